// The chat page: one conversation on the screen, its settings, and the request that runs.

import * as engine from "./engine.js";
import {Conversations} from "./conversations.js";
import {AnswerTurn, asMarkdown, requestMessage, userTurn} from "./turns.js";
import {button, make} from "./text.js";

const $ = id => document.getElementById(id), root = document.documentElement;
const OPTIONS = ["system", "temperature", "top_p", "max_tokens"];
const MAX_TOKENS = 4096;  // of an answer, which a small model may never end
const KINDS = {image: "image/*", audio: "audio/*"};
const MAX_TITLE = 48;
let conversation = blank(), running = null, attached = [], cards = [];  // running: {controller} of the answer that streams

function blank() { return {id: String(Date.now()) + Math.random().toString(36).slice(2, 8), title: "", changed: 0, model: "", messages: []}; }
function stored(store, name, value) {
  try { if (value !== undefined) store.setItem(name, value); return store.getItem(name); } catch { return null; }
}
function say(text) { $("status").textContent = text; }

// ── theme ──
function showTheme() { $("theme").textContent = root.dataset.theme === "dark" ? "Light" : "Dark"; }
$("theme").onclick = () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  stored(localStorage, "loom-theme", root.dataset.theme);
  showTheme();
};
showTheme();

// ── the engine ──
async function connect() {
  try {
    cards = await engine.models();
    $("locked").hidden = true;
    drawModels();
  } catch (error) {
    $("locked").hidden = !(error instanceof engine.Locked);
    $("model").textContent = error instanceof engine.Locked ? "" : "not reachable";
  }
}
function card() { return cards.find(each => each.id === $("models").value) || cards[0] || {}; }
// Return the last part of a path, which is the name of a model that was given as a file or folder.
function shortName(id) { return id.startsWith("/") ? id.replace(/\/+$/, "").split("/").pop() : id; }
function drawModels() {
  $("models").replaceChildren(...cards.map(each => new Option(each.parent ? `${each.id} (adapter)` : shortName(each.id), each.id)));
  const wanted = conversation.model || stored(localStorage, "loom-model");
  if (cards.some(each => each.id === wanted)) $("models").value = wanted;
  $("choice").hidden = cards.length < 2;
  drawModel();
}
function drawModel() {
  const {id, max_model_len: length, input_modalities: kinds = [], chat_sampling_params: chat = {}} = card();
  $("model").textContent = cards.length < 2 ? `${shortName(id)} · ${length} tokens` : `${length} tokens`;
  $("model").title = id;
  const accepted = Object.keys(KINDS).filter(kind => kinds.includes(kind));
  $("attach").hidden = !accepted.length;
  $("files").accept = accepted.map(kind => KINDS[kind]).join(",");
  const sampling = {max_tokens: MAX_TOKENS, ...chat};
  for (const name of ["temperature", "top_p", "max_tokens"]) $(name).placeholder = sampling[name] ?? "model's";
}
$("models").onchange = () => { stored(localStorage, "loom-model", $("models").value); drawModel(); };
$("key-form").onsubmit = event => {
  event.preventDefault();
  engine.setKey($("key").value);
  $("key").value = "";
  connect();
};

// ── the conversation ──
const conversations = new Conversations($("conversations"), $("toast"), open);
function open(found) {
  stop();
  conversation = found || blank();
  conversations.show(conversation.id);
  stored(sessionStorage, "loom-open", conversation.id);
  if (cards.length) drawModels();
  draw();
  readOn();
  closeSide();
  $("message").focus();
}
function draw() {
  $("log").replaceChildren();
  conversation.messages.forEach((message, at) => {
    if (message.role === "user") $("log").append(userTurn(message, text => edit(at, text)));
    else {
      const turn = new AnswerTurn(message, () => again(at));
      turn.end();
      $("log").append(turn.node);
    }
  });
  $("export").hidden = !conversation.messages.length;
  $("log").scrollTop = $("log").scrollHeight;
}
function edit(at, text) {
  stop();
  const {files} = conversation.messages[at];
  conversation.messages.length = at;
  submit(text, files || []);
}
function again(at) {
  stop();
  conversation.messages.length = at;
  draw();
  answer();
}
function submit(text, files) {
  const message = {role: "user", text, ...(files.length ? {files} : {})};
  conversation.messages.push(message);
  if (!conversation.title) conversation.title = (text || files[0].name).replace(/\s+/g, " ").slice(0, MAX_TITLE);
  conversation.model = cards.length > 1 ? $("models").value : "";
  draw();
  answer();
}
function requestBody() {
  const system = $("system").value.trim(), {id, chat_sampling_params: chat = {}} = card();
  const body = {messages: [...(system ? [{role: "system", content: system}] : []), ...conversation.messages.map(requestMessage).filter(Boolean)]};
  if (cards.length > 1) body.model = id;
  Object.assign(body, {max_tokens: Math.min(MAX_TOKENS, card().max_model_len || MAX_TOKENS)}, chat);
  for (const name of ["temperature", "top_p", "max_tokens"]) if ($(name).value !== "") body[name] = Number($(name).value);
  return body;
}
function answer() {
  const body = requestBody(), message = {role: "assistant", text: "", thought: "", calls: []};
  conversation.messages.push(message);
  receive(message, (signal, onStream) => engine.stream(body, signal, onStream));
}
// Read the last answer from its begin, if the page was left while it came.
function readOn() {
  const message = conversation.messages[conversation.messages.length - 1];
  if (!message?.stream) return;
  Object.assign(message, {text: "", thought: "", calls: []});
  $("log").lastChild.remove();
  receive(message, signal => engine.rest(message.stream, signal));
}
async function receive(message, start) {
  const asked = conversation, begun = performance.now(), controller = new AbortController();
  const turn = new AnswerTurn(message, () => again(asked.messages.indexOf(message)));
  running = {controller};
  const mine = running;
  $("log").append(turn.node);
  turn.node.setAttribute("aria-busy", "true");
  turn.body.classList.add("cursor");
  setBusy(true);
  let first = 0, count = 0, usage = null, finish = "";
  try {
    for await (const event of start(controller.signal, id => { message.stream = id; conversations.save(asked); })) {
      usage = event.usage || usage;
      finish = event.finish || finish;
      const {content, reasoning, reasoning_content, tool_calls} = event.delta, thought = reasoning || reasoning_content;
      if (content || thought || tool_calls) { first = first || performance.now(); count += 1; }
      message.text += content || "";
      message.thought += thought || "";
      for (const call of tool_calls || []) addCall(message.calls, call);
      turn.update();
      const log = $("log");
      if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") {
      finish = "stopped";
      if (message.stream) engine.drop(message.stream);
    } else {
      if (error instanceof engine.Locked) $("locked").hidden = false;
      finish = "error";
      message.error = error.message;
    }
  }
  delete message.stream;
  message.note = noteOf(finish, usage ? usage.completion_tokens : count, first, begun);
  turn.body.classList.remove("cursor");
  turn.node.removeAttribute("aria-busy");
  turn.end();
  if (finish === "error" && !message.text) dropUnanswered(asked, message);
  if (running === mine) { running = null; setBusy(false); }
  say(finish === "error" ? message.error : `Answer ${finish === "stopped" ? "stopped" : "complete"}.`);
  if (asked.messages.length) await conversations.save(asked);
  else await conversations.forget(asked);
  if (asked === conversation) $("export").hidden = false;
}
// What was refused is not part of the next request; it goes back to the box, so that it can be changed.
function dropUnanswered(asked, message) {
  asked.messages.splice(asked.messages.indexOf(message), 1);
  const refused = asked.messages.pop();
  if (asked === conversation && refused && !$("message").value) { $("message").value = refused.text; attached = refused.files || []; drawAttached(); fit(); }
}
function addCall(calls, {index, id, function: piece = {}}) {
  const call = calls[index] = calls[index] || {id, type: "function", function: {name: "", arguments: ""}};
  call.function.name += piece.name || "";
  call.function.arguments += piece.arguments || "";
}
function noteOf(finish, count, first, begun) {
  const now = performance.now();
  const notes = [finish === "length" ? "cut: max tokens or the context's end" : finish === "stop" ? "" : finish];
  if (count) notes.push(`${count} token${count === 1 ? "" : "s"}`);
  if (count > 1 && first) notes.push(`${((count - 1) * 1000 / (now - first)).toFixed(1)} tokens/s`);
  if (first) notes.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
  return notes.filter(Boolean).join(" · ");
}
function stop() { if (running) running.controller.abort(); }
function setBusy(isBusy) { $("send").hidden = isBusy; $("stop").hidden = !isBusy; if (!isBusy) $("message").focus(); }

// ── the box ──
const message = $("message");
function fit() { message.style.height = "auto"; message.style.height = message.scrollHeight + 2 + "px"; }
message.oninput = fit;
message.onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
  if (event.key === "ArrowUp" && !message.value) {
    const turns = document.querySelectorAll(".turn.user"), last = turns[turns.length - 1];
    if (last) { event.preventDefault(); last.beginEdit(); }
  }
};
$("ask").onsubmit = event => {
  event.preventDefault();
  const text = message.value.trim(), files = attached;
  if ((!text && !files.length) || running) return;
  if (!$("options").checkValidity() && $("settings").hidden) $("show-settings").click();  // a hidden field cannot say what it wants
  if (!$("options").reportValidity()) return;
  message.value = "";
  attached = [];
  drawAttached();
  fit();
  submit(text, files);
};
$("stop").onclick = stop;
document.onkeydown = event => {
  if (event.key === "Escape") { if ($("side").classList.contains("open")) closeSide(); else stop(); }
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); open(null); }
};

// ── files ──
async function attach(files) {
  const kinds = card().input_modalities || [];
  for (const file of files) {
    const kind = file.type.split("/")[0];
    if (!kinds.includes(kind)) { say(`${file.name} is not attached: this model takes ${kinds.join(" and ") || "text"}`); continue; }
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
    attached = [...attached, {name: file.name, kind, url}];
  }
  drawAttached();
}
function drawAttached() {
  $("attached").replaceChildren(...attached.map(file => {
    const drop = button("✕", () => { attached = attached.filter(each => each !== file); drawAttached(); });
    drop.setAttribute("aria-label", `Remove ${file.name}`);
    return make("li", "", file.name, drop);
  }));
}
$("attach").onclick = () => $("files").click();
$("files").onchange = () => { attach([...$("files").files]); $("files").value = ""; };
message.onpaste = event => { if (event.clipboardData.files.length) { event.preventDefault(); attach([...event.clipboardData.files]); } };
document.ondragover = event => event.preventDefault();
document.ondrop = event => { event.preventDefault(); attach([...event.dataTransfer.files]); };

// ── controls ──
$("new").onclick = () => open(null);
$("export").onclick = () => {
  const link = make("a", "");
  link.href = URL.createObjectURL(new Blob([asMarkdown(conversation)], {type: "text/markdown"}));
  link.download = `${conversation.title.replace(/[^\p{L}\p{N} -]/gu, "").trim() || "chat"}.md`;
  link.click();
  URL.revokeObjectURL(link.href);
};
$("show-settings").onclick = () => {
  const isHidden = $("settings").hidden = !$("settings").hidden;
  $("show-settings").setAttribute("aria-expanded", !isHidden);
};
$("options").onsubmit = event => event.preventDefault();
for (const name of OPTIONS) {
  $(name).value = stored(localStorage, "loom-" + name) || "";
  $(name).onchange = () => { if ($(name).checkValidity()) stored(localStorage, "loom-" + name, $(name).value); else $("options").reportValidity(); };
}
function closeSide() { $("side").classList.remove("open"); $("show-side").setAttribute("aria-expanded", "false"); }
$("show-side").onclick = () => { $("side").classList.add("open"); $("show-side").setAttribute("aria-expanded", "true"); $("new").focus(); };
$("hide-side").onclick = () => { closeSide(); $("show-side").focus(); };

await Promise.all([connect(), conversations.load()]);
open(conversations.find(stored(sessionStorage, "loom-open")));
root.dataset.isReady = "true";
