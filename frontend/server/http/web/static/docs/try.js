// The box that sends a request to this engine and shows its answer, as it comes.

import {make} from "./schema.js";

const MOST = 200000;  // characters of an answer that are shown
const MOST_ROWS = 24;  // of the box with the body
const EVENTS = [  // where the events of streams have their text, by API
  event => event.choices?.map(choice => choice.delta?.content ?? choice.text ?? "").join(""),
  event => typeof event.delta === "string" && /text\.delta$/.test(event.type) ? event.delta : "",
  event => event.type === "content_block_delta" ? event.delta.text : "",
  event => event.message?.content ?? event.response,
];

export function key() { try { return sessionStorage.getItem("loom-key") || ""; } catch { return ""; } }
export function setKey(value) { try { sessionStorage.setItem("loom-key", value); } catch { /* asked again at each load */ } }

function headers(isOpen, type) {
  return {...(type ? {"content-type": type} : {}), ...(key() && !isOpen ? {authorization: `Bearer ${key()}`} : {})};
}

function button(label, className = "") {
  const node = make("button", className, label);
  node.type = "button";
  return node;
}

function labelled(text, node, className = "") {
  return make("label", className, make("span", "", text), node);
}

function textOf(line) {
  if (!/^(data: )?\{/.test(line)) return "";
  try {
    const event = JSON.parse(line.replace(/^data: /, ""));
    return EVENTS.map(read => read(event)).find(Boolean) || "";
  } catch { return ""; }
}

function quoted(text) { return `'${text.replaceAll("'", "'\\''")}'`; }

// `request`: {path, method, example, type, hasStream, isOpen, hasKey, actsOnAll}
export function tryBox(request) {
  const {path, method, type, isOpen} = request, isForm = type === "multipart/form-data";
  const node = make("form", "try"), inputs = {}, status = make("p", "soft"), shown = make("pre", "answer"), joined = make("p", "joined");
  status.setAttribute("role", "status");
  joined.hidden = shown.hidden = true;
  shown.tabIndex = 0;
  shown.setAttribute("aria-label", "Answer");
  node.setAttribute("aria-label", `Try ${method.toUpperCase()} ${path}`);
  node.append(make("h3", "", "Try it"));
  if (request.actsOnAll) node.append(make("p", "warning", "This acts on the whole engine, for everybody who uses it."));
  for (const [, name] of path.matchAll(/{(\w+)}/g)) {
    inputs[name] = make("input");
    inputs[name].required = true;
    node.append(labelled(name, inputs[name], "line"));
  }
  const query = make("input");
  query.placeholder = "name=value&…";
  if (/\?/.test(request.summary)) node.append(labelled("Query", query, "line"));
  const file = make("input");
  file.type = "file";
  if (isForm) {
    file.required = true;
    node.append(labelled("file", file, "line"));
  }
  const body = make("textarea");
  body.spellcheck = false;
  body.value = JSON.stringify(request.example, null, 2);
  const fit = () => { body.rows = Math.min(body.value.split("\n").length, MOST_ROWS); };
  body.oninput = fit;
  fit();
  if (method === "post") node.append(labelled(isForm ? "Other fields, as JSON" : "Body", body));
  const send = button("Send", "main"), stop = button("Stop"), curl = button("Copy as curl"), stream = make("input");
  send.type = "submit";
  stop.hidden = true;
  stream.type = "checkbox";
  node.append(make("div", "buttons", send, stop, curl, ...(request.hasStream ? [labelled("stream", stream, "check")] : [])), status, joined, shown);

  const fields = () => JSON.parse(body.value || "{}");
  stream.onchange = () => {
    try { body.value = JSON.stringify({...fields(), stream: stream.checked}, null, 2); fit(); } catch { /* reported when it is sent */ }
  };
  const address = () => {
    const filled = path.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(inputs[name].value));
    return filled.slice(1) + (query.value ? "?" + query.value : "");
  };
  function payload() {
    if (method !== "post") return undefined;
    const given = fields();
    if (!isForm) return body.value;
    const form = new FormData();
    form.append("file", file.files[0]);
    for (const [name, value] of Object.entries(given)) for (const each of [value].flat()) form.append(name, each);
    return form;
  }
  curl.onclick = async () => {
    const words = [`curl ${quoted(new URL(address(), document.baseURI).href)}`];
    if (method === "delete") words.push("-X DELETE");
    if (request.hasKey && !isOpen) words.push('-H "authorization: Bearer $TOKENLOOM_API_KEY"');
    if (isForm) {
      words.push("-F file=@clip.wav");
      try { words.push(...Object.entries(fields()).map(([name, value]) => `-F ${quoted(`${name}=${value}`)}`)); } catch { /* the box says so */ }
    } else if (method === "post") words.push('-H "content-type: application/json"', `-d ${quoted(body.value)}`);
    try { await navigator.clipboard.writeText(words.join(" \\\n     ")); status.textContent = "Copied."; } catch { status.textContent = "The browser does not let this page copy."; }
  };
  body.onkeydown = event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); node.requestSubmit(); }
  };
  let running = null;
  stop.onclick = () => running?.abort();
  node.onsubmit = async event => {
    event.preventDefault();
    if (running) return;
    const begun = performance.now(), seconds = () => `${((performance.now() - begun) / 1000).toFixed(2)} s`;
    let text = "", size = 0, head = "";
    joined.textContent = shown.textContent = "";
    joined.hidden = shown.hidden = true;
    shown.className = "answer";
    running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    status.textContent = "Waiting …";
    try {
      let sent;
      try { sent = payload(); } catch (error) { throw new Error(`the body is no JSON: ${error.message}`); }
      const answer = await fetch(address(), {method: method.toUpperCase(), body: sent, signal: running.signal, headers: headers(isOpen, isForm || method !== "post" ? "" : "application/json")});
      head = `${answer.status} ${answer.statusText}`;
      if (!answer.ok) shown.classList.add("failed");
      const kind = answer.headers.get("content-type") || "", isStream = /event-stream|ndjson/.test(kind);
      const warning = answer.headers.get("warning");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      shown.hidden = false;
      for (let rest = "";;) {
        const {value, done} = await reader.read();
        if (done) break;
        size += value.length;
        if (text.length < MOST) text += value;
        if (!isStream) continue;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        joined.append(lines.map(textOf).join(""));
        joined.hidden = !joined.textContent;
        shown.textContent = text.slice(0, MOST);
        status.textContent = `${head} · ${seconds()} · ${size} characters so far`;
      }
      if (!isStream && /json/.test(kind)) try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* shown as it came */ }
      shown.textContent = text.slice(0, MOST) + (text.length > MOST || size > text.length ? "\n… cut" : "");
      status.textContent = [head, seconds(), `${size} characters`, warning].filter(Boolean).join(" · ");
      if (answer.status === 401) status.textContent += " · give the API key above";
    } catch (error) {
      status.textContent = error.name === "AbortError" ? [head, "stopped after", seconds()].filter(Boolean).join(" ") : `Not sent: ${error.message}`;
    }
    running = null;
    send.disabled = false;
    stop.hidden = true;
  };
  return node;
}
