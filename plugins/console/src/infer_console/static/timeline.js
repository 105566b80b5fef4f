// Recorded runs in place of a server: the same view of them.

import { by, el } from "./dom.js";
import { appear, pause, say, steps, take } from "./view.js";

const runs = [...document.querySelectorAll("script.run")].map((run) => JSON.parse(run.textContent));

function play({ title, records }) {
  steps.clear();
  pause(false);
  take(records);
  by("zoom").value = by("lanes").clientWidth / steps.all.length; // as far as the slider goes
  say(`recorded: ${title}, ${steps.all.length} steps`, `recorded: ${title}, ${steps.all.length} steps`);
}

by("pause").hidden = true;
by("run").append(...runs.map(({ title }, n) => el("option", { value: n }, title)));
by("run").onchange = () => play(runs[by("run").value]);
play(runs[0]);
appear(true);
