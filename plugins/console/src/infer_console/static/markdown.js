// A model's Markdown as elements. No text of it is ever parsed as HTML, and links lead to http and https only.
// ``put(parent, text, at)`` appends text that stands at ``at`` in the source.

import { copied, el } from "./dom.js";
import { highlighted } from "./highlight.js";

const BREAK = /\r\n|[\n\r\u2028\u2029]/g;
const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(?=\S)(.*)$/s;
const RULE = /^\s{0,3}([-*_])\s*(?:\1\s*){2,}$/;
const QUOTE = /^\s{0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const CELLS = /^\s*\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?\s*)?$/;
const DEEPEST = 8; // of quotes and lists in each other
const LONGEST = 5000; // characters of a line in which marks are looked for

export function render(source, put = (parent, text) => parent.append(text)) {
  const lines = [];
  let at = 0;
  for (const found of [...source.matchAll(BREAK), null]) {
    lines.push({ text: source.slice(at, found?.index), at });
    if (found) at = found.index + found[0].length;
  }
  const all = document.createDocumentFragment();
  blocks(all, lines, put, 0);
  return all;
}

const cut = (line, length) => ({ text: line.text.slice(length), at: line.at + length });

function blocks(parent, lines, put, depth) {
  let i = 0;
  let paragraph = null;
  const take = (fits) => {
    const from = i;
    while (i < lines.length && fits(lines[i].text)) i++;
    return lines.slice(from, i);
  };
  while (i < lines.length) {
    const line = lines[i];
    const { text } = line;
    let found;
    let block = null;
    if (!text.trim()) {
      i++;
    } else if (text.length > LONGEST) {
      i++;
      parent.append((block = el("p")));
      put(block, text, line.at);
    } else if ((found = FENCE.exec(text))) {
      i++;
      const closing = found[1];
      const inside = take((t) => !(t.trim().startsWith(closing) && !t.trim().slice(closing.length).replaceAll(closing[0], "")));
      i++;
      block = code(inside, found[2], put);
    } else if ((found = HEADING.exec(text))) {
      i++;
      block = el(`h${Math.min(6, found[1].length + 2)}`);
      inline(block, found[2].trimEnd().replace(/(?<!#)#+$/, "").trimEnd(), line.at + text.length - found[2].length, put, 0);
    } else if (RULE.test(text)) {
      i++;
      block = el("hr");
    } else if (depth < DEEPEST && QUOTE.test(text)) {
      block = el("blockquote");
      blocks(block, take((t) => QUOTE.test(t)).map((l) => cut(l, QUOTE.exec(l.text)[0].length)), put, depth + 1);
    } else if (depth < DEEPEST && (found = ITEM.exec(text))) {
      block = list(found, lines, i, put, depth);
      i = block.next;
      block = block.node;
    } else if (text.includes("|") && i + 1 < lines.length && CELLS.test(lines[i + 1].text)) {
      const head = line;
      i += 2;
      block = grid(head, take((t) => t.includes("|")), put);
    } else {
      i++;
      if (paragraph) paragraph.append("\n");
      else parent.append((paragraph = el("p")));
      inline(paragraph, text, line.at, put, 0);
      continue;
    }
    paragraph = null;
    if (block) parent.append(block);
  }
}

function list(first, lines, i, put, depth) {
  const ordered = /\d/.test(first[2]);
  const node = el(ordered ? "ol" : "ul", ordered ? { start: parseInt(first[2], 10) } : {});
  while (i < lines.length) {
    const found = ITEM.exec(lines[i].text);
    if (!found || found[1].length > first[1].length + 1 || /\d/.test(found[2]) !== ordered) break;
    const indent = found[1].length + 2;
    const own = [cut(lines[i++], found[0].length)];
    while (i < lines.length) {
      const { text } = lines[i];
      const spaces = text.length - text.trimStart().length;
      const blank = !text.trim();
      if (blank ? !/^\s+\S/.test(lines[i + 1]?.text ?? "") : spaces < indent && (ITEM.test(text) || spaces === 0)) break;
      own.push(cut(lines[i++], Math.min(spaces, indent)));
    }
    const item = el("li");
    blocks(item, own, put, depth + 1);
    node.append(item);
  }
  return { node, next: i };
}

function code(lines, language, put) {
  const node = el("code", language ? { "data-language": language } : {});
  const fill = (pieces) => {
    node.replaceChildren();
    let [n, done] = [0, 0]; // the line and how much of it is there, because lines need not be adjacent in the source
    for (const [kind, text] of pieces) {
      const parent = kind ? node.appendChild(el("span", { class: kind })) : node;
      for (const part of text.split(/(?<=\n)/)) {
        if (part) put(parent, part, lines[n].at + done);
        [n, done] = part.endsWith("\n") ? [n + 1, 0] : [n, done + part.length];
      }
    }
  };
  fill(highlighted(lines.map(({ text }) => text).join("\n"), language, fill));
  const button = el("button", {
    type: "button",
    click: () => copied(button, node.textContent),
  }, "Copy");
  return el("pre", {}, button, node);
}

function grid(head, rows, put) {
  const row = (line, tag) => {
    const tr = el("tr");
    let at = 0;
    const text = line.text.trimEnd().replace(/\|$/, "");
    if (text.trimStart().startsWith("|")) at = text.indexOf("|") + 1;
    for (const cell of text.slice(at).split("|")) {
      const td = el(tag);
      inline(td, cell, line.at + at, put, 0);
      tr.append(td);
      at += cell.length + 1;
    }
    return tr;
  };
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, ...rows.map((line) => row(line, "td")))));
}

const KINDS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

function inline(parent, text, at, put, depth) {
  const mark = /\\([!-/:-@[-`{-~])|(`+)|(\*\*|__|~~|\*|_)|\[([^[\]]{1,500})\]\(([^()\s]{1,2000})\)|https?:\/\/[^\s<>"'`*)\]]+/g;
  let from = 0;
  const plain = (to) => {
    if (to > from) put(parent, text.slice(from, to), at + from);
  };
  for (let found; text.length <= LONGEST && (found = mark.exec(text)); ) {
    const i = found.index;
    let next = i + found[0].length;
    let node = null;
    if (found[1]) {
      plain(i);
      from = i + 1;
      continue;
    } else if (found[2]) {
      const end = text.indexOf(found[2], next);
      if (end < 0) continue;
      node = el("code");
      put(node, text.slice(next, end), at + next);
      next = end + found[2].length;
    } else if (found[3]) {
      const end = depth < DEEPEST ? closing(text, found[3], i, next) : -1;
      if (end < 0) continue;
      node = el(KINDS[found[3]]);
      inline(node, text.slice(next, end), at + next, put, depth + 1);
      next = end + found[3].length;
    } else {
      const href = safe(found[5] ?? found[0]);
      if (!href) continue;
      node = el("a", { href, rel: "noopener noreferrer", target: "_blank" });
      if (found[4]) inline(node, found[4], at + i + 1, put, DEEPEST);
      else put(node, found[0], at + i);
    }
    plain(i);
    parent.append(node);
    from = mark.lastIndex = next;
  }
  plain(text.length);
}

// Where an emphasis ends that begins at ``i``; -1 if it is none: snake_case and 2 * 3 have marks that mean nothing.
function closing(text, mark, i, next) {
  const word = mark.includes("_");
  if (/^\s?$/.test(text[next] ?? "") || (word && /\w/.test(text[i - 1] ?? ""))) return -1;
  for (let end = text.indexOf(mark, next + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (/\s/.test(text[end - 1]) || (word && /\w/.test(text[end + mark.length] ?? ""))) continue;
    if (mark === "*" && (text[end + 1] === "*" || text[end - 1] === "*")) continue;
    return end;
  }
  return -1;
}

export function safe(address) {
  try {
    const url = new URL(address);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}
