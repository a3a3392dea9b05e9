// The official JavaScript client, unpatched, against the server at argv[2]; prints what it saw as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0, timeout: 20_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "What is the capital of Peru?" }];
const chat = { model, messages, temperature: 0 };
const seen = { model };

seen.completion = (await client.completions.create({ model, prompt: "The capital of Peru is", temperature: 0 })).choices[0].text;
seen.chat = (await client.chat.completions.create(chat)).choices[0].message.content;

const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
seen.streamed = "";
for await (const chunk of stream) {
  seen.streamed += chunk.choices[0]?.delta.content ?? "";
  seen.completion_tokens = chunk.usage?.completion_tokens;
}
seen.helper = (await client.chat.completions.stream(chat).finalChatCompletion()).choices[0].message.content;

const schema = { type: "object", properties: { city: { enum: ["Lima"] } }, required: ["city"], additionalProperties: false };
const format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
seen.parsed = (await client.chat.completions.parse({ ...chat, response_format: format })).choices[0].message.parsed;

const tools = [{ type: "function", function: { name: "find", parameters: schema } }];
const called = await client.chat.completions.create({ ...chat, tools, tool_choice: "required", parallel_tool_calls: false });
const call = called.choices[0].message.tool_calls[0];
seen.call = [call.function.name, JSON.parse(call.function.arguments)];

seen.response = (await client.responses.create({ model, input: messages, temperature: 0 })).output_text;
const events = client.responses.stream({ model, input: messages, temperature: 0 });
seen.response_streamed = (await events.finalResponse()).output_text;

const long = await client.completions.create({ model, prompt: "The", max_tokens: 2000, stream: true });
for await (const _ of long) break; // and nobody listens any more

seen.errors = [];
const wrong = [{ ...chat, model: "another" }, { ...chat, temperature: -1 }];
for (const body of wrong) {
  await client.chat.completions.create(body).catch((error) => seen.errors.push([error.constructor.name, error.param]));
}
console.log(JSON.stringify(seen));
