// Vercel's AI SDK by the provider at argv[3], unpatched, against the server at argv[2]; prints what it saw as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const name = "tokenloom-demo";
const settings = { baseURL: process.argv[2] + "/v1", apiKey: "none", name: "tokenloom" };
const providers = {
  compatible: () => createOpenAICompatible({ ...settings, supportsStructuredOutputs: true, includeUsage: true })(name),
  chat: () => createOpenAI(settings).chat(name),
  responses: () => createOpenAI(settings).responses(name),
};
const question = { role: "user", content: "What is the capital of Peru?" };
// without it the SDK names what it was given by ids that a server has to have stored
const providerOptions = { openai: { store: false } };
const common = { providerOptions, model: providers[process.argv[3]](), temperature: 0, maxRetries: 0, maxOutputTokens: 300 };
const asked = { ...common, messages: [question] };

const street = z.object({ name: z.literal("Union"), number: z.literal(7) });
const address = z.object({ city: z.enum(["Lima"]), street, others: z.array(street).min(1).max(1) });
const union = { name: "Union", number: 7 };
const wanted = JSON.stringify({ city: "Lima", street: union, others: [union] });
const isWanted = (found) => JSON.stringify(found) === wanted;
const find = tool({ description: "finds an address", inputSchema: address, execute: async () => "found" });
const cap = tool({ inputSchema: address.pick({ city: true }) });
const tools = { find };
const forced = { ...asked, tools, toolChoice: "required", stopWhen: stepCountIs(1) };

const after = async (messages) =>
  (await generateText({ ...common, tools, messages: [question, ...messages, question], maxOutputTokens: 16 })).finishReason !== "error";

const checks = {
  async talk() {
    const result = await generateText(asked);
    return [result.text.length > 0, result.usage.outputTokens > 0, await after(result.response.messages)];
  },
  async streamed() {
    const result = streamText(asked);
    let text = "";
    for await (const delta of result.textStream) text += delta;
    return [text === (await generateText(asked)).text, (await result.usage).outputTokens > 0];
  },
  async structured() {
    return isWanted((await generateText({ ...asked, output: Output.object({ schema: address }) })).output);
  },
  async structured_stream() {
    const result = streamText({ ...asked, output: Output.object({ schema: address }) });
    let last;
    for await (const part of result.partialOutputStream) last = part;
    return isWanted(last);
  },
  async called() {
    const result = await generateText(forced);
    return [isWanted(result.toolCalls[0]?.input), result.toolResults[0]?.output, await after(result.response.messages)];
  },
  async called_in_a_stream() {
    const result = streamText(forced);
    const kinds = new Set();
    for await (const part of result.fullStream) kinds.add(part.type);
    return [isWanted((await result.toolCalls)[0]?.input), kinds.has("tool-input-delta"), await after((await result.response).messages)];
  },
  async cut() {
    const result = await generateText({ ...forced, tools: { cap }, maxOutputTokens: 60 });
    return [result.toolCalls.every((call) => call.input.city === "Lima"), result.text.length > 0];
  },
  async cut_stream() {
    const result = streamText({ ...forced, tools: { cap }, maxOutputTokens: 60, onError() {} });
    for await (const _ of result.fullStream);
    return [(await result.toolCalls)[0].input.city, (await result.text).length > 0];
  },
  async too_long() {
    try {
      await generateText({ ...common, prompt: "hello ".repeat(4000) });
    } catch (error) {
      return [error.name, error.statusCode, error.data?.error?.code];
    }
  },
};

const seen = {};
for (const [check, run] of Object.entries(checks)) {
  seen[check] = await run().catch((error) => `${error.name}: ${error.message}`.slice(0, 600));
}
console.log(JSON.stringify(seen));
