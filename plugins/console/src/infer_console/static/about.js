// What is installed and chosen, and why; and the settings with their sources.

import { by, el, table } from "./dom.js";

export function setUp({ plugins, settings, exact, max_seq_len: longest }) {
  const columns = ["slot", "name", "chosen", "why", "description", "distribution", "version"];
  by("about").replaceChildren(
    el("p", {}, `Answers ${exact ? "do not depend" : "may depend"} on who else is served (exact: ${exact}). A prompt and its answer have at most ${longest} tokens.`),
    el("h2", {}, "Installed and chosen"),
    table(columns, plugins.map((row) => columns.map((name) => row[name])), "Installed and chosen"),
    el("h2", {}, "Settings"),
    table(["key", "value", "source", "what it is"], settings.map((s) => [s.key, s.value, s.source, s.what]), "Settings"));
}
