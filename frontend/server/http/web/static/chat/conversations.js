// The list of conversations: open, rename, delete with undo.

import {button, make} from "./text.js";
import * as store from "./store.js";

export class Conversations {
  // `onOpen` gets the conversation to show, or null for a new one.
  constructor(list, toast, onOpen) {
    this.list = list;
    this.toast = toast;
    this.onOpen = onOpen;
    this.all = [];
    this.current = null;  // id of the one that is shown
  }
  async load() {
    this.all = await store.list();
    this.draw();
  }
  find(id) { return this.all.find(each => each.id === id) || null; }
  async save(conversation) {
    conversation.changed = Date.now();
    this.all = [conversation, ...this.all.filter(each => each.id !== conversation.id)];
    this.draw();
    await store.put(conversation);
  }
  async forget(conversation) {
    this.all = this.all.filter(each => each !== conversation);
    this.draw();
    await store.remove(conversation.id);
  }
  show(id) {
    this.current = id;
    this.draw();
  }
  draw() {
    this.list.replaceChildren(...this.all.map(each => {
      const open = button(each.title, () => this.onOpen(each), "open");
      open.title = each.title;
      const rename = button("✎", () => this.rename(each, item), "small"), drop = button("✕", () => this.remove(each), "small");
      rename.setAttribute("aria-label", `Rename ${each.title}`);
      drop.setAttribute("aria-label", `Delete ${each.title}`);
      const item = make("li", "", open, rename, drop);
      if (each.id === this.current) item.setAttribute("aria-current", "true");
      return item;
    }));
  }
  rename(conversation, item) {
    const box = make("input", "");
    box.value = conversation.title;
    box.setAttribute("aria-label", "Name of the conversation");
    const end = async keeps => {
      box.onblur = null;
      if (keeps && box.value.trim()) { conversation.title = box.value.trim(); await store.put(conversation); }
      this.draw();
    };
    box.onblur = () => end(true);
    box.onkeydown = event => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    };
    item.replaceChildren(box);
    box.focus();
    box.select();
  }
  async remove(conversation) {
    await this.forget(conversation);
    if (this.current === conversation.id) this.onOpen(null);
    const [text, undo] = this.toast.children;
    text.textContent = `“${conversation.title}” was deleted.`;
    this.toast.hidden = false;
    const timer = setTimeout(() => { this.toast.hidden = true; }, 8000);
    undo.onclick = async () => {
      clearTimeout(timer);
      this.toast.hidden = true;
      await store.put(conversation);
      await this.load();
      this.onOpen(conversation);
    };
  }
}
