// Markdown as nodes. Raw HTML is text, links open beside the page, images of other sites become links: no answer of a model
// can run a script, or tell another server that it was read.

export function make(tag, className, ...inside) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...inside);
  return node;
}

export function button(label, action, className = "small") {
  const node = make("button", className, label);
  node.type = "button";
  node.onclick = action;
  return node;
}

const reader = window.markdownit({html: false, linkify: true, breaks: false});
const plainLink = reader.renderer.rules.link_open || ((tokens, at, options, _, self) => self.renderToken(tokens, at, options));
reader.renderer.rules.link_open = (tokens, at, options, environment, self) => {
  tokens[at].attrSet("target", "_blank");
  tokens[at].attrSet("rel", "noopener noreferrer");
  return plainLink(tokens, at, options, environment, self);
};
reader.renderer.rules.image = (tokens, at, options, environment, self) => {
  const source = tokens[at].attrGet("src") || "", label = tokens[at].content || source;
  const escape = reader.utils.escapeHtml;
  return `<a href="${escape(source)}" target="_blank" rel="noopener noreferrer">${escape(label)}</a>`;
};

export async function copy(text, source) {
  try { await navigator.clipboard.writeText(text); } catch { return; }
  const label = source.textContent;
  source.textContent = "Copied";
  setTimeout(() => { source.textContent = label; }, 1200);
}

// Replace the content of `node` by the Markdown `text`.
export function render(node, text) {
  node.innerHTML = reader.render(text);
  for (const table of node.querySelectorAll("table")) {
    const around = make("div", "table");
    table.replaceWith(around);
    around.append(table);
  }
  for (const block of node.querySelectorAll("pre")) {
    const around = make("div", "code");
    block.replaceWith(around);
    const code = block.textContent.replace(/\n$/, "");
    const button_ = button("Copy", () => copy(code, button_));
    around.append(block, button_);
  }
}
