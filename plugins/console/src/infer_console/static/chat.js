// The conversation: what is asked, and the answer as it arrives.

import { call, events } from "./api.js";
import { by, copied, el, notice } from "./dom.js";
import { MessageView } from "./message.js";
import { onChats, readChats, readSettings, writeChats, writeSettings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
let begun = false;
let model = "";
let chats = [];
let chat = fresh();
let views = [];
let running = null; // the AbortController of the answer that arrives

// ``at`` changes with the chat, so that tabs see which of them has the newer one.
function fresh() {
  return { id: `${Date.now()}-${crypto.getRandomValues(new Uint32Array(1))[0]}`, at: 0, messages: [], title: "" };
}

// Ask this server, and no longer the one before.
export function setUp(served) {
  model = served.model;
  for (const name of NUMBERS) by("sampling").elements[name].placeholder = served.sampling[name] ?? "";
  if (begun) return;
  begun = true;
  const form = by("sampling");
  const kept = readSettings();
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = kept[field.name] ?? field.checked;
    else field.value = kept[field.name] ?? "";
  }
  form.oninput = () => {
    writeSettings(Object.fromEntries([...form.elements].map((f) => [f.name, f.type === "checkbox" ? f.checked : f.value])));
    by("log").classList.toggle("colours", form.elements.colours.checked);
  };
  form.onsubmit = (event) => event.preventDefault();
  form.oninput();
  by("side").open = matchMedia("(min-width: 45rem)").matches;
  by("new").onclick = () => open(fresh());
  by("clear").onclick = () => {
    if (!confirm("Delete all chats that this browser keeps?")) return;
    chats = [];
    open(fresh());
    keep();
  };
  by("ask").onsubmit = (event) => {
    event.preventDefault();
    const text = by("text").value;
    if (running || !text.trim()) return;
    by("text").value = "";
    add({ role: "user", content: text });
    answer();
  };
  by("text").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      by("ask").requestSubmit();
    }
  };
  by("stop").onclick = () => running?.abort();
  chats = readChats();
  open(chats[0] ?? fresh());
  onChats(() => {
    refill();
    const other = chats.find((each) => each.id === chat.id);
    if (other && other !== chat && !running) open(other);
    else list();
  });
}

// Take the chats as this browser keeps them now. Those that no other tab has changed have probabilities only here.
function refill() {
  const mine = new Map([chat, ...chats].map((each) => [each.id, each]));
  chats = readChats().map((each) => (mine.get(each.id)?.at === each.at ? mine.get(each.id) : each));
}

function open(which) {
  running?.abort();
  chat = which;
  views = [];
  by("log").replaceChildren();
  for (const message of chat.messages) show(message);
  list();
}

function list() {
  by("chats").replaceChildren(...chats.map((each) => el("li", {},
    el("button", { type: "button", "aria-current": each === chat ? "true" : null, click: () => open(each) }, each.title))));
}

function keep() {
  if (chat.messages.length) {
    chat.title = chat.messages[0].content.slice(0, 60);
    chat.at = Date.now();
    refill();
    chats = [chat, ...chats.filter((each) => each.id !== chat.id)];
  }
  const kept = writeChats(chats);
  chats = chats.slice(0, Math.max(1, kept));
  list();
}

function add(message) {
  chat.messages.push(message);
  return show(message);
}

function show(message) {
  const from = () => chat.messages.indexOf(message);
  const actions = message.role === "user" ? [["Edit", () => edit(message)]]
    : [["Again", () => again(from())], ["Copy", (event) => copied(event.target, message.content)]];
  const view = new MessageView(message, actions);
  views.push(view);
  by("log").append(view.node);
  by("log").scrollTop = by("log").scrollHeight;
  return view;
}

function cutAt(index) {
  running?.abort();
  chat.messages.length = index;
  for (const view of views.splice(index)) view.node.remove();
}

function again(index) {
  cutAt(index);
  answer();
}

function edit(message) {
  const view = views[chat.messages.indexOf(message)];
  const field = el("textarea", { rows: "4", "aria-label": "The message, changed" });
  field.value = message.content;
  const done = () => {
    const text = field.value;
    const at = chat.messages.indexOf(message);
    if (at < 0 || !text.trim()) return;
    cutAt(at);
    add({ role: "user", content: text });
    answer();
  };
  view.body.replaceChildren(field, el("div", { class: "row" },
    el("button", { type: "button", class: "first", click: done }, "Send"),
    el("button", { type: "button", click: () => view.show() }, "Cancel")));
  field.focus();
}

// The body of the request, by the form. Throws an Error if what is in a field cannot be sent.
function asked(seed) {
  const form = by("sampling").elements;
  const messages = chat.messages.map(({ role, content }) => ({ role, content }));
  if (form.system.value.trim()) messages.unshift({ role: "system", content: form.system.value });
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, seed };
  for (const name of NUMBERS) if (name !== "seed" && form[name].value !== "") body[name] = Number(form[name].value);
  if (form.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (form.thinking.value) body.chat_template_kwargs = { enable_thinking: form.thinking.value === "true" };
  if (form.tools.value.trim()) {
    try {
      body.tools = JSON.parse(form.tools.value);
    } catch (error) {
      throw new Error(`The tools are no JSON: ${error.message}`);
    }
  }
  return body;
}

async function answer() {
  const said = by("sampling").elements.seed.value;
  const seed = said === "" ? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 : Number(said);
  const control = (running = new AbortController());
  const started = performance.now();
  const message = { role: "assistant", content: "", reasoning: "", calls: [], marks: [], seed, running: true };
  let body;
  try {
    body = asked(seed);
  } catch (error) {
    running = null;
    notice(error.message);
    return;
  }
  notice("");
  const view = add(message);
  const owner = chat;
  by("log").setAttribute("aria-busy", "true");
  by("stop").hidden = !(by("send").hidden = true);
  let pending = [];
  let drawn = 0;
  let took = 0;
  try {
    const response = await call("v1/chat/completions", { body, signal: control.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      message.usage = chunk.usage ?? message.usage;
      for (const choice of chunk.choices) pending = take(message, choice, pending, performance.now() - started);
      if (performance.now() - drawn > Math.max(30, 4 * took)) {
        const began = performance.now();
        refresh(view);
        drawn = performance.now();
        took = drawn - began;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "you";
    else message.error = error.message;
  }
  message.ms = performance.now() - started;
  message.running = false;
  if (running === control) {
    running = null;
    by("send").hidden = !(by("stop").hidden = true);
    by("log").removeAttribute("aria-busy");
  }
  refresh(view);
  if (owner === chat) keep();
}

function refresh(view) {
  const log = by("log");
  const below = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  view.show();
  if (below) log.scrollTop = log.scrollHeight;
}

// Add a chunk to the message. Tokens without text of their own, such as half a character, wait for the text to come.
function take(message, { delta, logprobs, finish_reason: finish }, pending, ms) {
  const tokens = [...pending, ...(logprobs?.content ?? [])];
  if (tokens.length || delta.content || delta.reasoning_content || delta.tool_calls) message.ttft ??= ms;
  if (finish) message.finish = finish;
  for (const { index, function: { name, arguments: text } } of delta.tool_calls ?? []) {
    const entry = (message.calls[index] ??= { name: "", arguments: "" });
    entry.name += name ?? "";
    entry.arguments += text ?? "";
  }
  if (delta.reasoning_content) message.reasoning += delta.reasoning_content;
  if (delta.reasoning_content || delta.tool_calls) return [];
  if (!delta.content) return tokens;
  let start = message.content.length;
  message.content += delta.content;
  const exact = tokens.map(({ token }) => token).join("") === delta.content;
  const parts = exact ? tokens.map((token) => [token.token.length, [token]]) : tokens.length ? [[delta.content.length, tokens]] : [];
  for (const [length, own] of parts) {
    message.marks.push({ start, end: start + length, tokens: own });
    start += length;
  }
  return [];
}
