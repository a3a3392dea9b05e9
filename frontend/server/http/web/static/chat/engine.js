// The engine behind the page: its models, and answers as streams of deltas.

function key() { try { return sessionStorage.getItem("loom-key"); } catch { return null; } }
export function setKey(value) { try { sessionStorage.setItem("loom-key", value); } catch { /* asked again at each load */ } }

function headers() {
  const given = key();
  return {"content-type": "application/json", ...(given ? {authorization: "Bearer " + given} : {})};
}

export class Locked extends Error {}

async function refusal(answer) {
  if (answer.status === 401) return new Locked("the API key is missing or wrong");
  try { return new Error((await answer.json()).error.message); } catch { return new Error("status " + answer.status); }
}

// Return the cards of the model and its adapters. Throws Locked without a valid key.
export async function models() {
  const answer = await fetch("v1/models", {headers: headers()});
  if (!answer.ok) throw await refusal(answer);
  return (await answer.json()).data;
}

// Yield {delta, finish, usage} of each event of an answer.
export async function* stream(body, signal) {
  const options = {method: "POST", headers: headers(), signal, body: JSON.stringify({...body, stream: true, stream_options: {include_usage: true}})};
  const answer = await fetch("v1/chat/completions", options);
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      yield {delta: choice ? choice.delta : {}, finish: choice ? choice.finish_reason : null, usage: event.usage || null};
    }
  }
}
