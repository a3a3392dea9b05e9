// The page of the API: every endpoint and object of openapi.json, a search over them, and a box to try each.

import {make, nameOf, nestedNames, table, typeOf} from "./schema.js";
import {key, setKey, tryBox} from "./try.js";

const $ = id => document.getElementById(id), root = document.documentElement;
const HIT = 40;  // matching endpoints, up to which their matching fields are marked

function block(id, head, ...inside) {
  const node = make("details", "", make("summary", "", ...head), make("div", "body", ...inside));
  node.id = id;
  return node;
}

function drawOperation(api, path, method, operation) {
  const schemas = api.components.schemas, hasKey = !!api.components.securitySchemes;
  const [type, content] = Object.entries(operation.requestBody?.content || {})[0] || [];
  const schema = content && (content.schema.$ref ? schemas[nameOf(content.schema.$ref)] : content.schema);
  const failures = Object.entries(operation.responses).filter(([code]) => code !== "200");
  const errors = failures.map(([code, each]) => make("tr", "", make("td", "", make("code", "", code)), make("td", "", each.description)));
  const request = {
    path, method, type, hasKey, example: content?.example || {}, summary: operation.summary, hasStream: !!schema?.properties?.stream,
    isOpen: !!operation.security && !operation.security.length, actsOnAll: operation.tags[0] === "Control" && method !== "get",
  };
  const more = make("details", "errors", make("summary", "", "Errors"), make("table", "", make("tbody", "", ...errors)));
  const head = [make("span", "method " + method, method.toUpperCase()), make("code", "", path), make("span", "soft", operation.summary || "")];
  const node = block(method + path, head, tryBox(request), ...(schema ? [table(schema)] : []), ...(errors.length ? [more] : []));
  const nested = schema ? nestedNames(schema, schemas) : [];
  node.dataset.words = [method, path, operation.summary, ...operation.tags, ...nested].join(" ").toLowerCase();
  return node;
}

function drawTag(api, {name, description}, operations) {
  const section = make("section", "", make("h2", "", name), make("p", "soft", description));
  section.id = "tag-" + name;
  const links = operations.map(([path, method, operation]) => {
    const node = drawOperation(api, path, method, operation), to = make("a", "", make("span", "method " + method, method.toUpperCase()), " ", path);
    to.href = "#" + node.id;
    section.append(node);
    return make("li", "", to);
  });
  $("paths").append(section);
  const head = make("a", "", name);
  head.href = "#" + section.id;
  $("index").append(make("div", "", head, make("ul", "", ...links)));
}

function show(api) {
  const all = Object.entries(api.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => [path, method, operation]));
  for (const tag of api.tags) {
    const operations = all.filter(([, , operation]) => operation.tags[0] === tag.name);
    if (operations.length) drawTag(api, tag, operations);
  }
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    const node = block(name, [make("code", "", name), make("span", "soft", schema.description || "")], schema.properties ? table(schema) : make("p", "", ...typeOf(schema)));
    node.dataset.words = name.toLowerCase();
    $("schemas").append(node);
  }
  const hasKey = !!api.components.securitySchemes;
  $("version").textContent = api.info.version;
  $("key-form").hidden = !hasKey;
  $("key").value = key();
  told = `${all.length} endpoints of this engine, from its own openapi.json. ` + (hasKey ? "Requests need the API key." : "No key is needed.");
  $("note").textContent = told;
  root.dataset.isReady = "true";
  openTarget();
  if ($("search").value) filter();
}

function openTarget() {
  const node = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!node) return;
  if (node.tagName === "DETAILS") {
    if (node.hidden || node.parentNode.hidden) clear();
    node.open = true;
    node.querySelector("summary").focus({preventScroll: true});
  }
  node.scrollIntoView();
}

// ── the search ──
let told = "";
function filter() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), has = text => words.every(word => text.includes(word));
  let count = 0;
  for (const node of document.querySelectorAll("#paths section > details, #schemas > details")) {
    const rows = [...node.querySelectorAll("tr.field")], isNamed = has(node.dataset.words);
    const hits = words.length ? rows.filter(row => has(row.dataset.words)) : [];
    node.hidden = !isNamed && !hits.length;
    rows.forEach(row => row.classList.toggle("hit", hits.includes(row)));
    if (!node.hidden && node.closest("#paths")) count++;
  }
  for (const section of document.querySelectorAll("#paths section")) section.hidden = !section.querySelector(":scope > details:not([hidden])");
  $("objects").hidden = !document.querySelector("#schemas > details:not([hidden])");
  for (const item of document.querySelectorAll("#index li")) item.hidden = document.getElementById(decodeURIComponent(item.firstChild.hash.slice(1))).hidden;
  for (const group of document.querySelectorAll("#index > div")) group.hidden = !group.querySelector("li:not([hidden])");
  $("note").textContent = words.length ? `${count} ${count === 1 ? "endpoint matches" : "endpoints match"}` + (count && count <= HIT ? "; Enter opens the first." : ".") : told;
}
function clear() {
  $("search").value = "";
  filter();
}
$("search").oninput = filter;
$("find").onsubmit = event => {
  event.preventDefault();
  const first = document.querySelector("#paths section:not([hidden]) > details:not([hidden])");
  if (!first) return;
  first.open = true;
  first.querySelector("summary").focus();
  (first.querySelector("tr.hit") || first).scrollIntoView({block: "center"});
};
addEventListener("keydown", event => {
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "/" && !isTyping) {
    event.preventDefault();
    $("search").focus();
  } else if (event.key === "Escape" && event.target === $("search")) clear();
});

// ── key and theme ──
$("key").onchange = () => setKey($("key").value);
function drawTheme() { $("theme").textContent = root.dataset.theme === "dark" ? "Light" : "Dark"; }
$("theme").onclick = () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("loom-theme", root.dataset.theme); } catch { /* it holds until the next load */ }
  drawTheme();
};
drawTheme();

addEventListener("hashchange", openTarget);
fetch("openapi.json").then(answer => answer.json()).then(show).catch(error => { $("note").textContent = `openapi.json cannot be read: is the engine up? (${error.message})`; });
