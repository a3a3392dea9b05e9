// Schemas of the OpenAPI document as tables of fields: name, type, default, sentence and limits.

export function make(tag, className, ...inside) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...inside);
  return node;
}

export const nameOf = ref => ref.slice(ref.lastIndexOf("/") + 1);
const MANY = 1e9;  // bounds beyond it only say how wide a number is

function link(name) {
  const node = make("a", "", name);
  node.href = "#" + name;
  return node;
}

// Return nodes that name the type. That a field may be null is not said: null means that it is left out.
export function typeOf(schema) {
  if (schema.$ref) return [link(nameOf(schema.$ref))];
  const forms = schema.type ? [] : (schema.anyOf || schema.oneOf || []).filter(form => form.type !== "null");
  if (forms.length) return forms.flatMap((form, at) => at ? [" or ", ...typeOf(form)] : typeOf(form));
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.filter(each => each !== null).map(each => JSON.stringify(each)).join(" | ") || "null"];
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items || {})];
  if (schema.type === "object" && schema.additionalProperties instanceof Object)
    return ["object of ", ...typeOf(schema.additionalProperties)];
  return [schema.format === "binary" ? "file" : schema.type || "any"];
}

// Return a range in words. Counts have a unit, and none of them is below 0.
function span(least, most, unit = "") {
  const from = unit && !least ? undefined : least, one = (most ?? from) === 1;
  if (from === undefined && most === undefined) return "";
  const range = most === undefined ? `at least ${from}` : from === undefined ? `at most ${most}` : `${from} to ${most}`;
  return unit ? `${range} ${one ? unit : unit + "s"}` : range;
}

function limitsOf(schema) {
  const found = new Set(), shown = bound => bound !== undefined && Math.abs(bound) < MANY ? bound : undefined;
  for (const form of [schema, ...(schema.anyOf || []), ...(schema.allOf || []).flatMap(each => each.anyOf || [])]) {
    const above = shown(form.exclusiveMinimum);
    if (above !== undefined) found.add([`above ${above}`, span(undefined, shown(form.maximum))].filter(Boolean).join(", "));
    else found.add(span(shown(form.minimum), shown(form.maximum)));
    found.add(span(form.minLength, form.maxLength, "character"));
    found.add(span(form.minItems, form.maxItems, "item"));
  }
  found.delete("");
  return [...found].join("; ");
}

function defaultOf(name, field, schema) {
  if ((schema.required || []).includes(name)) return make("strong", "", "required");
  if (field["x-default"] !== undefined) return make("span", "soft", field["x-default"]);
  return make("code", "", JSON.stringify(field.default));
}

// Return the names of the fields of a schema and of the objects in them, for the search.
export function nestedNames(schema, schemas) {
  const inner = JSON.stringify(schema.properties || {}).matchAll(/"#\/components\/schemas\/([\w.-]+)"/g);
  return [...inner].flatMap(([, name]) => Object.keys(schemas[name].properties || {}));
}

export function table(schema) {
  const fields = Object.entries(schema.properties || {}), required = schema.required || [];
  if (!fields.length) return make("p", "soft", "No fields.");
  const body = make("tbody");
  let group = "";
  for (const [name, field] of fields) {
    const own = required.includes(name) ? "required" : field["x-group"];
    if (own !== group && fields.length > 6) {
      const head = make("th", "", own);
      head.colSpan = 4;
      head.scope = "rowgroup";
      body.append(make("tr", "group", head));
    }
    group = own;
    const limits = limitsOf(field), text = make("td", "", field.description || "");
    if (limits) text.append(" ", make("span", "soft", `(${limits})`));
    const row = make("tr", "field", make("td", "", make("code", "", name)), make("td", "type", ...typeOf(field)), make("td", required.includes(name) ? "must" : "default", defaultOf(name, field, schema)), text);
    row.dataset.words = `${name} ${field.description || ""}`.toLowerCase();
    body.append(row);
  }
  const heads = ["field", "type", "default", "meaning and limits"].map(text => make("th", "", text));
  heads.forEach(head => { head.scope = "col"; });
  return make("div", "scroll", make("table", "fields", make("thead", "", make("tr", "", ...heads)), body));
}
