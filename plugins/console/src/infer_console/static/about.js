// What is installed and chosen, and why; and the settings with their sources.

import { by, el, table } from "./dom.js";

export function setUp({ model, loaded = true, plugins, settings, exact, max_seq_len: longest }) {
  if (!plugins) {
    const why = loaded ? "does not say what it has" : "is not loaded. It is when you ask it something";
    by("about").replaceChildren(el("p", {}, `${model} ${why}.`));
    return;
  }
  const columns = ["slot", "name", "chosen", "why", "description", "distribution", "version"];
  by("about").replaceChildren(
    el("p", {}, `Answers ${exact ? "do not depend" : "may depend"} on other requests (exact: ${exact}). A prompt and its answer together have at most ${longest} tokens.`),
    el("h2", {}, "Plugins"),
    table(columns, plugins.map((row) => columns.map((name) => row[name])), "Plugins"),
    el("h2", {}, "Settings"),
    table(["key", "value", "source", "description"], settings.map((s) => [s.key, s.value, s.source, s.what]), "Settings"));
}
