// Turns of a conversation as nodes.
//
// A user's message is {role, text, files}; an answer is {role, text, thought, calls, note, error}. A file is {name, kind,
// url}, kind image or audio, url a data: URL. While an answer comes it has `stream`, by which the engine knows it.

import {button, copy, make, render} from "./text.js";

// Return the message as OpenAI's API takes it; null for an answer that has nothing to send back.
export function requestMessage(message) {
  if (message.role !== "user") {
    const calls = message.calls && message.calls.length ? {tool_calls: message.calls} : {};
    const thought = message.thought ? {reasoning: message.thought} : {};
    return message.text || message.calls?.length ? {role: "assistant", content: message.text || null, ...thought, ...calls} : null;
  }
  if (!message.files?.length) return {role: "user", content: message.text};
  const parts = message.files.map(file => file.kind === "image"
    ? {type: "image_url", image_url: {url: file.url}}
    : {type: "input_audio", input_audio: {data: file.url.slice(file.url.indexOf(",") + 1), format: file.name.split(".").pop().toLowerCase()}});
  return {role: "user", content: message.text ? [...parts, {type: "text", text: message.text}] : parts};
}

export function userTurn(message, onEdit) {
  const turn = make("article", "turn user"), body = make("div", "text", message.text);
  turn.setAttribute("aria-label", "You");
  if (message.files?.length) turn.append(make("div", "files", ...message.files.map(fileView)));
  const edit = button("Edit", () => beginEdit());
  turn.append(body, make("div", "below", edit, button("Copy", event => copy(message.text, event.currentTarget))));
  function beginEdit() {
    const box = make("textarea", "");
    box.value = message.text;
    box.setAttribute("aria-label", "Edit the message");
    const form = make("form", "edit", box), save = make("button", "main", "Send");
    const cancel = button("Cancel", () => { form.replaceWith(body); edit.hidden = false; edit.focus(); }, "");
    form.append(make("div", "below", cancel, save));
    form.onsubmit = event => { event.preventDefault(); if (box.value.trim()) onEdit(box.value.trim()); };
    box.onkeydown = event => {
      if (event.key === "Escape") { event.stopPropagation(); cancel.click(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    };
    body.replaceWith(form);
    edit.hidden = true;
    box.focus();
  }
  turn.beginEdit = beginEdit;
  return turn;
}

function fileView(file) {
  const node = make(file.kind === "image" ? "img" : "audio", "");
  node.src = file.url;
  if (file.kind === "image") node.alt = file.name;
  else { node.controls = true; node.title = file.name; }
  return node;
}

// The node of an answer. `update` draws the message again, at most once a frame; `end` adds what can be done with it.
export class AnswerTurn {
  constructor(message, onAgain) {
    this.message = message;
    this.node = make("article", "turn assistant");
    this.node.setAttribute("aria-label", "Answer");
    this.body = make("div", "text");
    this.below = make("div", "below");
    this.onAgain = onAgain;
    this.thoughts = make("span", "");
    this.thinking = make("details", "", make("summary", "", "Reasoning"), this.thoughts);
    this.calls = make("div", "");
    this.node.append(this.thinking, this.body, this.calls, this.below);
    this.frame = 0;
    this.draw();
  }
  update() { this.frame = this.frame || requestAnimationFrame(() => { this.frame = 0; this.draw(); }); }
  draw() {
    const {text, thought, calls} = this.message;
    this.thinking.hidden = !thought;
    if (this.thoughts.textContent !== thought) this.thoughts.textContent = thought || "";
    render(this.body, text || "");
    (calls || []).forEach(({function: called}, index) => this.drawCall(called, index));
  }
  // A call stays open or folded while its arguments arrive.
  drawCall({name, arguments: given}, index) {
    const node = this.calls.children[index] || make("details", "call", make("summary", ""), make("pre", ""));
    if (!node.parentNode) this.calls.append(node);
    const [summary, shown] = node.children;
    summary.textContent = `Call of ${name}`;
    shown.textContent = prettyJson(given);
  }
  end() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.draw();
    const {text, note, error} = this.message;
    this.below.replaceChildren();
    if (error) this.node.insertBefore(make("div", "error", error), this.below);
    if (text) this.below.append(button("Copy", event => copy(text, event.currentTarget)));
    this.below.append(button("Again", this.onAgain), make("span", "note", note || ""));
  }
}

// Return JSON with a value in each line; the text itself if it is not JSON, as while it arrives.
function prettyJson(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

// The conversation as Markdown, for a file.
export function asMarkdown(conversation) {
  const parts = conversation.messages.map(({role, text, thought, calls, files}) => {
    const head = role === "user" ? "## You" : "## Answer";
    const shown = (files || []).map(file => `*(${file.kind}: ${file.name})*`).join("\n");
    const quoted = thought ? "> " + thought.trim().replace(/\n/g, "\n> ") : "";
    const called = (calls || []).map(({function: {name, arguments: given}}) => `Call of ${name}:\n\n\`\`\`json\n${prettyJson(given)}\n\`\`\``);
    return [head, shown, quoted, text, ...called].filter(Boolean).join("\n\n");
  });
  return [`# ${conversation.title}`, ...parts].join("\n\n") + "\n";
}
