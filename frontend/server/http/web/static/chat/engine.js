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

const RESUME_S = 120;  // for which the engine goes on with an answer that nobody reads
class Refused extends Error {}

// Yield {delta, finish, usage} of each event of an answer. `onStream` gets the id by which `rest` reads the answer again.
export async function* stream(body, signal, onStream) {
  const given = {...headers(), "x-stream-resume": RESUME_S};
  const answer = await fetch("v1/chat/completions", {method: "POST", headers: given, signal, body: JSON.stringify({...body, stream: true, stream_options: {include_usage: true}})});
  if (!answer.ok) throw await refusal(answer);
  const id = answer.headers.get("x-stream-id");
  if (id) onStream(id);
  yield* deltas(answer, id, signal);
}

// Yield the same from the answer's begin, for a page that was left meanwhile.
export async function* rest(id, signal) { yield* deltas(await read(id, "", signal), id, signal); }

// Stop the answer with this id.
export async function drop(id) {
  try { await fetch(`v1/streams/${id}`, {method: "DELETE", headers: headers()}); } catch { /* it ends by itself */ }
}

// Yield the deltas of an answer; when the network is lost, read on behind the last event.
async function* deltas(answer, id, signal) {
  for (let last = ""; answer;) {
    try {
      for await (const event of events(answer, id)) {
        if (event.id) last = event.id;
        if (event.data === "[DONE]") return;
        const body = JSON.parse(event.data);
        if (body.error) throw new Refused(body.error.message);
        const choice = body.choices[0];
        yield {delta: choice ? choice.delta : {}, finish: choice ? choice.finish_reason : null, usage: body.usage || null};
      }
      if (!id) return;
    } catch (error) {
      if (!id || error.name === "AbortError" || error instanceof Refused) throw error;
    }
    answer = await read(id, last, signal);
  }
}

// Yield {data, id} of each event. Of a stream with an id, events wait for the one that has the next id: all before it are whole.
async function* events(answer, stream) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", waiting = [], id = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (text + value).split("\n");
    text = lines.pop();
    for (const line of lines) {
      if (line.startsWith("id: ")) id = line.slice(4);
      if (!line.startsWith("data: ")) continue;
      waiting.push({data: line.slice(6), id});
      if (stream && !id) continue;
      yield* waiting;
      [waiting, id] = [[], ""];
    }
  }
}

// Return the answer from behind the event `last`, as soon as the network and the engine are there.
async function read(id, last, signal) {
  const end = Date.now() + RESUME_S * 1000, given = {...headers(), ...(last ? {"last-event-id": last} : {})};
  for (let wait = 250;; wait = Math.min(2 * wait, 4000)) {
    try {
      const answer = await fetch(`v1/streams/${id}`, {headers: given, signal});
      if (answer.ok) return answer;
      if (answer.status !== 503) throw new Refused("the rest of the answer is lost");
    } catch (error) {
      if (error.name === "AbortError" || error instanceof Refused || Date.now() > end) throw error;
    }
    await new Promise(resolve => setTimeout(resolve, wait));
  }
}
