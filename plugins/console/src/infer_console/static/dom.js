// Elements, made one by one: text is always text, and never parsed as HTML.

export const by = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function table(head, rows, caption) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {},
      el("caption", { class: "hidden" }, caption),
      el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, String(cell ?? ""))))))));
}

export const counted = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

export function notice(text) {
  by("notice").textContent = text;
}

// Download a value as a file of JSON.
export function save(value, name) {
  const link = el("a", { download: name });
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Copy a text to the clipboard, and say so on the button. A page of a plain http address has no API for that, so the
// text is then selected in a field, from which the browser copies as if by keys.
export async function copied(button, text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else select(text);
    button.textContent = "Copied";
  } catch (error) {
    notice(`Could not copy: ${error.message}`);
  }
}

function select(text) {
  const field = el("textarea", { class: "hidden", "aria-label": "Text to copy" });
  field.value = text;
  const before = document.activeElement;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  if (!done) throw new Error("select the text and press Ctrl+C.");
}
