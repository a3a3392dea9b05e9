// Ollama's client for JavaScript, unpatched, against the server at argv[2]; prints what it saw as JSON.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const model = "tokenloom-demo";
const messages = [{ role: "user", content: "What is the capital of Peru?" }];
const options = { temperature: 0, num_predict: 100 };
const schema = { type: "object", properties: { city: { const: "Lima" } }, required: ["city"], additionalProperties: false };
const called = {
  type: "object",
  properties: { name: { const: "find" }, parameters: schema },
  required: ["name", "parameters"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "find", description: "finds", parameters: schema } }];

const checks = {
  async talk() {
    const answer = await client.chat({ model, messages, options });
    return [answer.message.content, answer.done_reason, answer.eval_count > 0];
  },
  async streamed() {
    let text = "";
    for await (const part of await client.chat({ model, messages, options, stream: true })) text += part.message.content;
    return text;
  },
  async generated() {
    let text = "";
    for await (const part of await client.generate({ model, prompt: messages[0].content, options, stream: true })) text += part.response;
    return text;
  },
  async structured() {
    return JSON.parse((await client.chat({ model, messages, options, format: schema })).message.content);
  },
  async called() {
    const answer = await client.chat({ model, messages, options, tools, format: called });
    const result = { role: "tool", content: "found", tool_name: "find" };
    const after = await client.chat({ model, messages: [...messages, answer.message, result], tools, options: { ...options, num_predict: 8 } });
    const calls = answer.message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
    return [calls, after.done];
  },
  async embedded() {
    const answer = await client.embed({ model, input: ["Lima", "Oslo"] });
    return answer.embeddings.length;
  },
  async aborted() {
    const stream = await client.chat({ model, messages, stream: true, options });
    stream.abort();
    try {
      for await (const _ of stream);
    } catch (error) {
      return error.name;
    }
  },
  async listed() {
    const shown = await client.show({ model });
    return [(await client.list()).models[0].name, (await client.ps()).models[0].name, shown.capabilities[0]];
  },
  async refused() {
    try {
      await client.chat({ model: "llama3", messages });
    } catch (error) {
      return [error.name, error.status_code, error.message.includes("not served")];
    }
  },
};

const seen = {};
for (const [check, run] of Object.entries(checks)) {
  seen[check] = await run().catch((error) => `${error.name}: ${error.message}`.slice(0, 600));
}
console.log(JSON.stringify(seen));
