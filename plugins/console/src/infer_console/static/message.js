// One message on the page: its text, what is folded, and the probabilities of its tokens.

import { by, counted, el } from "./dom.js";
import { render } from "./markdown.js";

const WHO = { user: "You", assistant: "Model" };

export class MessageView {
  // ``actions`` are [name, what it does].
  constructor(message, actions) {
    this.message = message;
    this.thought = el("div");
    this.thinking = el("details", {}, el("summary", {}, "Reasoning"), this.thought);
    this.body = el("div", { class: "body" });
    this.calls = el("div");
    this.facts = el("span");
    this.error = el("p", { class: "error" });
    this.node = el("article", { class: message.role },
      el("header", {}, el("h2", {}, WHO[message.role])), this.thinking, this.body, this.calls, this.error,
      el("footer", {}, this.facts, ...actions.map(([name, act]) => el("button", { type: "button", click: act }, name))));
    this.hover = (event) => tip(this, event.target);
    for (const kind of ["mouseover", "focusin"]) this.node.addEventListener(kind, this.hover);
    this.node.addEventListener("mouseleave", () => tip(this, null));
    this.body.addEventListener("keydown", (event) => this.walk(event));
    this.show();
  }

  show() {
    const { message } = this;
    const marks = message.marks ?? [];
    this.body.replaceChildren(message.role === "user" ? message.content : render(message.content, putter(marks)));
    if (marks.length) this.body.setAttribute("tabindex", "0");
    this.thinking.hidden = !message.reasoning;
    if (message.reasoning) this.thought.replaceChildren(render(message.reasoning));
    const calls = message.calls ?? [];
    if (calls.length || this.calls.firstChild) {
      const open = [...this.calls.children].map((fold) => fold.open);
      this.calls.replaceChildren(...calls.map((call, i) => el("details", { open: open[i] },
        el("summary", {}, `Call to ${call.name}`), el("pre", {}, el("code", {}, call.arguments)))));
    }
    this.error.textContent = message.error ?? "";
    this.error.hidden = !message.error;
    this.facts.textContent = facts(message);
    for (const button of this.node.querySelectorAll("footer button")) button.disabled = Boolean(message.running);
  }

  // With the arrow keys, from token to token.
  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.target !== this.body) return;
    const tokens = [...this.body.querySelectorAll(".t")];
    const now = tokens.indexOf(this.body.querySelector(".here"));
    tokens[now]?.classList.remove("here");
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, now + step))];
    next?.classList.add("here");
    tip(this, next);
    event.preventDefault();
  }
}

const [FEW, SHORT_MS] = [20, 100]; // a rate of fewer tokens, or in less time, says more of the network
const ENDS = { length: "stopped at the token limit", tool_calls: "called a tool", you: "stopped by you" };

// What is said below an answer. ``ttft`` and ``ms`` are milliseconds since it was asked.
export function facts({ running, seed, usage, ttft, ms, finish }) {
  const said = [];
  if (running) said.push("…");
  if (usage) said.push(counted(usage.completion_tokens, "token"));
  if (usage?.prompt_tokens_details?.cached_tokens) said.push(`${counted(usage.prompt_tokens_details.cached_tokens, "prompt token")} cached`);
  if (ttft) said.push(`first token after ${Math.round(ttft)} ms`);
  if (usage?.completion_tokens > FEW && ms - ttft >= SHORT_MS) {
    said.push(`${(((usage.completion_tokens - 1) / (ms - ttft)) * 1000).toFixed(1)} tokens/s`);
  }
  if (finish && finish !== "stop") said.push(ENDS[finish] ?? `ended: ${finish}`);
  if (seed !== undefined) said.push(`seed ${seed}`);
  return said.join(" · ");
}

// Puts text into spans, one for each mark that it overlaps. A mark is a range of the answer with its tokens.
function putter(marks) {
  let m = 0;
  return (parent, text, at) => {
    if (m && marks[m - 1]?.end > at) m = 0;
    let from = at;
    const end = at + text.length;
    while (m < marks.length && marks[m].end <= from) m++;
    for (let k = m; k < marks.length && marks[k].start < end; k++) {
      const [begin, until] = [Math.max(from, marks[k].start), Math.min(end, marks[k].end)];
      if (begin > from) parent.append(text.slice(from - at, begin - at));
      const worst = Math.min(...marks[k].tokens.map((token) => Math.exp(token.logprob)));
      const level = worst < 0.1 ? "p0" : worst < 0.5 ? "p1" : worst < 0.9 ? "p2" : "p3";
      parent.append(el("span", { class: `t ${level}`, "data-mark": k }, text.slice(begin - at, until - at)));
      from = until;
    }
    if (from < end) parent.append(text.slice(from - at));
  };
}

// The likeliest tokens in the place of the one that a span shows.
function tip(view, span) {
  const box = by("tip");
  const mark = span?.classList?.contains("t") ? view.message.marks?.[span.dataset.mark] : null;
  box.hidden = !mark;
  if (!mark) return;
  const row = ({ token, logprob }, chosen) => el("tr", {},
    el("td", {}, chosen ? "▸" : ""), el("td", {}, JSON.stringify(token)), el("td", {}, percent(logprob)));
  box.replaceChildren(...mark.tokens.map((token) => el("table", {},
    row(token, true), ...(token.top_logprobs ?? []).filter((other) => other.token !== token.token).map((other) => row(other, false)))));
  const { left, bottom, top } = span.getBoundingClientRect();
  box.style.left = `${Math.max(0, Math.min(left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${bottom + box.offsetHeight < innerHeight ? bottom + 4 : Math.max(0, top - box.offsetHeight - 4)}px`;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -5 ? 1 : 3)}%`;
