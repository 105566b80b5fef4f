// The engine's view, of a server's steps or recorded ones. It draws while it is on the screen, at most once per frame.

import * as draw from "./draw.js";
import { by, counted, el, save, table } from "./dom.js";
import { Steps, quantile } from "./steps.js";
import { trace } from "./trace.js";

const RECENT = 200; // steps that figures are made of
const FIGURES_MS = 250;
const REST_MS = 150; // when the slider rests so long, the table is made, which takes longer than a frame

export const steps = new Steps();
let wanted = false;
let paused = false;
let chosen = null;
let end = 0; // while paused, the index of the last step that is drawn
let dirty = false;
let figured = 0;
let late = null;
let resting = null;
const hint = by("facts").textContent;

export function appear(on) {
  wanted = on;
  redraw();
}

// Take records. Those of another server take the place of what was there, and nothing of that stays chosen. Returns
// whether there is another server.
export function take(records) {
  const server = steps.hello?.server;
  for (const record of records) steps.take(record);
  const other = server !== undefined && steps.hello.server !== server;
  if (other && paused) pause(false);
  redraw();
  return other;
}

// Forget the steps of an engine that is not watched any more.
export function forget() {
  steps.clear();
  pause(false);
}

const said = { text: "", paused: "" };
export function say(text, whilePaused = "paused; still recording") {
  [said.text, said.paused] = [text, whilePaused];
  redraw();
}

export function redraw() {
  if (dirty || !wanted) return;
  dirty = true;
  requestAnimationFrame(frame);
}

function visible() {
  const zoom = Number(by("zoom").value);
  const columns = Math.max(1, Math.floor(by("lanes").clientWidth / zoom));
  let last = steps.all.length;
  if (paused) last = steps.upTo(end);
  return { zoom, shown: steps.all.slice(Math.max(0, last - columns), last) };
}

function frame(now) {
  dirty = false;
  if (!wanted) return;
  const { zoom, shown } = visible();
  draw.lanes(by("lanes"), steps, shown, zoom, chosen);
  draw.tokens(by("tokens"), shown, zoom, steps.hello?.budget, chosen);
  draw.times(by("times"), shown, zoom, chosen);
  const due = now - figured > FIGURES_MS;
  if (due || paused) {
    const map = steps.mapAt(paused ? (chosen?.index ?? end) : Infinity);
    draw.blocks(by("map"), map, steps.hello?.states ?? []);
    caption(map);
    scrubber(shown);
  }
  if (due) {
    figured = now;
    figures();
  } else {
    late ??= setTimeout(() => { // so that the last figures are those of the last step
      late = null;
      redraw();
    }, FIGURES_MS + 10);
  }
}

function figures() {
  const recent = steps.recent(RECENT);
  const [first, last] = [recent[0], recent.at(-1)];
  const seconds = last ? (last.end - first.start) / 1000 : 0;
  const [prompt, cached, generated, proposed, accepted] = last?.totals ?? [];
  const gaps = recent.map((step) => step.gap).filter((gap) => gap !== null);
  const ttfts = steps.ended.slice(-RECENT).map((e) => e.ttft).filter((t) => t !== null);
  const spread = (values) => (values.length ? `${quantile(values, 0.5).toFixed(1)} / ${quantile(values, 0.99).toFixed(1)} ms` : "–");
  const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "–");
  const rows = {
    Running: last?.running ?? "–",
    Waiting: last?.waiting ?? "–",
    "Tokens/s": seconds ? ((generated - first.totals[2]) / seconds).toFixed(0) : "–",
    "Steps/s": seconds ? (recent.length / seconds).toFixed(1) : "–",
    "ITL p50 / p99": spread(gaps),
    "TTFT p50 / p99": spread(ttfts),
    "Prefix hits": share(cached, prompt),
    "Drafts accepted": share(accepted, proposed),
    "Cache in use": last && steps.hello ? share(steps.hello.cache - last.free, steps.hello.cache) : "–",
    "Missed records": steps.lost,
  };
  by("figures").replaceChildren(...Object.entries(rows).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
}

function caption(map) {
  const none = steps.hello?.fault ? `no more maps: ${steps.hello.fault}` : map ? "" : "no map yet; some cache pools have none";
  const counts = map ? `${map.counts.join(", ")}${map.each > 1 ? `; each cell is ${map.each} blocks` : ""}; after step ${map.step}` : "";
  by("blocks").textContent = `(${[counts, none].filter(Boolean).join("; ")})`;
  by("state").textContent = paused ? said.paused : said.text;
}

function scrubber(shown) {
  const slider = by("scrub");
  slider.disabled = !steps.all.length;
  if (slider.disabled) {
    by("at").textContent = "";
    return;
  }
  [slider.min, slider.max] = [steps.all[0].index, steps.all.at(-1).index];
  slider.value = chosen && paused ? chosen.index : shown.at(-1)?.index ?? slider.max;
  by("at").textContent = slider.value;
}

export function pause(on) {
  paused = on;
  by("pause").setAttribute("aria-pressed", String(on));
  by("pause").textContent = on ? "Resume" : "Pause";
  if (on) end = steps.all.at(-1)?.index ?? 0;
  else choose(null);
  redraw();
}

function choose(step, moving = false) {
  chosen = step;
  by("chosen").hidden = !step;
  by("chosen").textContent = step ? `Step ${step.index}` : "";
  by("facts").textContent = step
    ? `${step.ms.toFixed(2)} ms, ${counted(step.tokens, "token")} in ${counted(step.passes, "pass", "passes")}; ${step.running} running, ${step.waiting} waiting, ${step.free} positions free.`
    : hint;
  clearTimeout(resting);
  by("works").setAttribute("aria-busy", String(moving));
  if (moving) resting = setTimeout(works, REST_MS);
  else works();
  redraw();
}

// The table of the chosen step.
function works() {
  const step = chosen;
  by("works").setAttribute("aria-busy", "false");
  by("works").replaceChildren();
  if (!step) return;
  const id = (number) => steps.ids.get(number) ?? `#${number}`;
  const rows = [
    ...step.works.map(([n, start, length, prefill, drew, proposed, accepted]) => [id(n), prefill ? "prefill" : "decode", start, length, drew ? "yes" : "no", proposed, accepted]),
    ...Array.from(step.decodes, (n, i) => [id(n), "decode", step.at[i], 1, "yes", 0, 0]),
  ];
  by("works").append(table(["request", "kind", "start", "length", "sampled", "drafts", "accepted"], rows, `Requests of step ${step.index}`));
}

by("pause").onclick = () => pause(!paused);
by("export").onclick = () => save(trace(steps), "infer-trace.json");
by("zoom").oninput = redraw;
by("scrub").oninput = () => {
  const index = Number(by("scrub").value);
  if (!paused) pause(true);
  const { shown } = visible();
  if (!shown.length || index > shown.at(-1).index || index < shown[0].index) end = Math.min(steps.all.at(-1).index, index + (shown.length >> 1));
  choose(steps.all[steps.upTo(index) - 1] ?? null, true);
};
by("lanes").onclick = (event) => {
  const { zoom, shown } = visible();
  const step = shown[Math.floor(event.offsetX / zoom)];
  if (!step) return;
  if (!paused) pause(true);
  choose(step);
};
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  draw.readColors();
  redraw();
});
draw.readColors();
