// Colors for code, by highlight.js (hljs-*.js, as published), whose grammars are loaded when a language first occurs.

import { notice } from "./dom.js";

const GRAMMARS = {
  bash: "bash console sh shell zsh", c: "c h", cpp: "c++ cc cpp hpp", csharp: "c# cs csharp", css: "css", diff: "diff patch",
  go: "go golang", ini: "ini toml", java: "java", javascript: "javascript js jsx mjs", json: "json jsonc", kotlin: "kotlin kt",
  php: "php", python: "py python python3", ruby: "rb ruby", rust: "rs rust", sql: "sql", swift: "swift",
  typescript: "ts tsx typescript", xml: "html svg xml", yaml: "yaml yml",
};
const BY_NAME = new Map(Object.entries(GRAMMARS).flatMap(([grammar, names]) => names.split(" ").map((name) => [name, grammar])));
const LONGEST = 20000; // characters of code that are colored; a page that draws more would stutter
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };

let hljs = null;
const loading = new Map(); // grammar -> a promise

function load(grammar) {
  if (!loading.has(grammar)) {
    // The table has the name, so that no text of a model is in an address.
    const modules = [import("./hljs-core.min.js"), import(`./hljs-${grammar}.min.js`)];
    loading.set(grammar, Promise.all(modules).then(([core, { default: rules }]) => {
      hljs = core.default;
      hljs.registerLanguage(grammar, rules);
    }));
    loading.get(grammar).catch((error) => notice(`Code is not colored: ${error.message}`));
  }
  return loading.get(grammar);
}

// A code block in pieces of [class, text], which together are the code. ``later`` gets them again once the grammar has
// been loaded.
export function highlighted(code, language, later) {
  const grammar = BY_NAME.get(language?.toLowerCase());
  const plain = [["", code]];
  if (!grammar || code.length > LONGEST) return plain;
  if (hljs?.getLanguage(grammar)) return pieces(code, grammar);
  load(grammar).then(() => later(pieces(code, grammar)), () => {}); // why it failed is said by load
  return plain;
}

// highlight.js writes HTML, of which only its own spans and entities are read here; a piece is text.
function pieces(code, grammar) {
  const found = [];
  const open = [];
  const { value } = hljs.highlight(code, { language: grammar, ignoreIllegals: true });
  for (const part of value.split(/(<span class="[^"]*">|<\/span>)/)) {
    if (part === "</span>") open.pop();
    else if (part.startsWith("<span ")) open.push(part.slice(13, -2));
    else if (part) found.push([open.at(-1) ?? "", part.replace(/&(?:amp|lt|gt|quot|#x27);/g, (entity) => ENTITIES[entity])]);
  }
  return found;
}
