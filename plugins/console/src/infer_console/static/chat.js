// The conversation: what is asked, and the answer as it arrives.

import { call, events } from "./api.js";
import { by, copied, el, notice, save } from "./dom.js";
import { MessageView } from "./message.js";
import { onChats, readChats, readSettings, writeChats, writeSettings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const OTHERWISE = { max_tokens: "as many as fit", seed: "random" }; // what the server has no number for
let begun = false;
let model = "";
let answered = () => {};
let chats = [];
let chat = fresh();
let views = [];
let running = null; // the AbortController of the answer that arrives
const faults = new Map(); // field -> where it is said what is wrong with it

// ``at`` changes with the chat, so that tabs see which of them has the newer one.
function fresh() {
  return { id: `${Date.now()}-${crypto.getRandomValues(new Uint32Array(1))[0]}`, at: 0, messages: [], title: "", named: false };
}

// Ask this model of the server's from here on.
export function turnTo(name) {
  model = name;
}

// Ask this server's model, and no longer the one before. ``call`` is called after each answer.
export function setUp(served, call) {
  [model, answered] = [served.model, call];
  const form = by("sampling");
  for (const name of NUMBERS) form.elements[name].placeholder = served.sampling[name] ?? OTHERWISE[name];
  form.elements.max_tokens.max = served.max_seq_len ?? "";
  if (begun) return;
  begun = true;
  const kept = readSettings();
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = kept[field.name] ?? field.checked;
    else {
      field.value = kept[field.name] ?? "";
      const fault = el("output", { class: "error", id: `fault-${field.name}` });
      field.setAttribute("aria-describedby", fault.id);
      field.parentNode.after(fault);
      faults.set(field, fault);
    }
  }
  form.oninput = () => {
    writeSettings(Object.fromEntries([...form.elements].map((f) => [f.name, f.type === "checkbox" ? f.checked : f.value])));
    by("log").classList.toggle("colors", form.elements.colors.checked);
    check();
  };
  form.onsubmit = (event) => event.preventDefault();
  form.oninput();
  by("side").open = matchMedia("(min-width: 45rem)").matches;
  by("new").onclick = () => {
    open(fresh());
    by("text").focus();
  };
  by("clear").onclick = () => {
    if (!confirm("Delete all chats stored in this browser?")) return;
    chats = [];
    open(fresh());
    store();
  };
  by("find").oninput = list;
  by("title").onchange = () => {
    chat.named = Boolean(by("title").value.trim());
    chat.title = by("title").value.trim();
    keep();
    by("title").value = chat.title;
  };
  by("save").onclick = () => save({ model, messages: messages(whole) }, `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-")}.json`);
  by("delete").onclick = () => {
    if (!confirm(`Delete the chat "${chat.title}"?`)) return;
    refill();
    chats = chats.filter((each) => each.id !== chat.id);
    open(chats[0] ?? fresh());
    store();
    by("text").focus();
  };
  by("ask").onsubmit = (event) => {
    event.preventDefault();
    const text = by("text").value;
    if (running || !text.trim() || !ready()) return;
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
  by("log").onscroll = () => {
    by("tip").hidden = true; // its token has moved away
  };
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") by("tip").hidden = true;
  });
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
  by("tip").hidden = true;
  for (const message of chat.messages) show(message);
  list();
}

// The chats that hold what is searched for, in their names or messages.
function list() {
  const sought = by("find").value.trim().toLowerCase();
  const holds = (text) => text.toLowerCase().includes(sought);
  const found = chats.filter(({ title, messages }) => holds(title) || messages.some(({ content }) => holds(content)));
  by("chats").replaceChildren(...found.map((each) => el("li", {},
    el("button", { type: "button", title: each.title, "aria-current": each === chat ? "true" : null, click: () => reopen(each, holds) }, each.title))));
  by("find").parentNode.hidden = !chats.length;
  by("none").textContent = chats.length && !found.length ? "No chat found" : "";
  by("one").hidden = !chats.some(({ id }) => id === chat.id);
  if (document.activeElement !== by("title")) by("title").value = chat.title;
}

// Open a chat at the first message that holds what is searched for, or at its end.
function reopen(which, holds) {
  open(which);
  by("text").focus();
  if (by("find").value.trim()) views.find(({ message }) => holds(message.content))?.node.scrollIntoView();
}

function keep() {
  if (chat.messages.length) {
    if (!chat.named) chat.title = chat.messages[0].content.slice(0, 60);
    chat.at = Date.now();
    refill();
    chats = [chat, ...chats.filter((each) => each.id !== chat.id)];
  }
  store();
}

function store() {
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
    : [["Regenerate", () => again(from())], ["Copy", (event) => copied(event.target, message.content)]];
  const view = new MessageView(message, actions);
  views.push(view);
  by("log").append(view.node);
  by("log").scrollTop = by("log").scrollHeight;
  return view;
}

function cutAt(index) {
  running?.abort();
  by("tip").hidden = true;
  chat.messages.length = index;
  for (const view of views.splice(index)) view.node.remove();
}

function again(index) {
  if (!ready()) return;
  cutAt(index);
  answer();
}

function edit(message) {
  const view = views[chat.messages.indexOf(message)];
  const field = el("textarea", { rows: "4", "aria-label": "Edit message" });
  field.value = message.content;
  const done = () => {
    const text = field.value;
    const at = chat.messages.indexOf(message);
    if (at < 0 || !text.trim() || !ready()) return;
    cutAt(at);
    add({ role: "user", content: text });
    answer();
  };
  view.body.replaceChildren(field, el("div", { class: "row" },
    el("button", { type: "button", class: "first", click: done }, "Send"),
    el("button", { type: "button", click: () => view.show() }, "Cancel")));
  field.focus();
}

// Say beside each field what is wrong with it. Returns the first field with a fault, if any.
function check() {
  const { elements } = by("sampling");
  elements.tools.setCustomValidity(toolsFault(elements.tools.value));
  for (const [field, fault] of faults) {
    fault.textContent = field.validationMessage;
    field.setAttribute("aria-invalid", String(!field.validity.valid));
  }
  return [...faults.keys()].find((field) => !field.validity.valid);
}

function toolsFault(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "Tools must be a JSON array.";
  } catch (error) {
    return `Tools are not valid JSON: ${error.message}`;
  }
}

// Whether all settings can be sent. If not, the first that cannot gets the focus.
function ready() {
  const wrong = check();
  if (!wrong) return true;
  by("side").open = true;
  wrong.focus();
  return false;
}

const asSent = ({ role, content }) => ({ role, content });

const whole = ({ role, content, reasoning, calls }) => ({
  role,
  content,
  reasoning_content: reasoning || undefined,
  tool_calls: calls?.length ? calls.map((call, i) => ({ id: `call_${i}`, type: "function", function: call })) : undefined,
});

// The conversation in the API's form.
function messages(form) {
  const system = by("sampling").elements.system.value;
  const said = chat.messages.map(form);
  return system.trim() ? [{ role: "system", content: system }, ...said] : said;
}

// The body of the request, by the form.
function asked(seed) {
  const form = by("sampling").elements;
  const body = { model, messages: messages(asSent), stream: true, stream_options: { include_usage: true }, seed };
  for (const name of NUMBERS) if (name !== "seed" && form[name].value !== "") body[name] = Number(form[name].value);
  if (form.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (form.thinking.value) body.chat_template_kwargs = { enable_thinking: form.thinking.value === "true" };
  if (form.tools.value.trim()) body.tools = JSON.parse(form.tools.value);
  return body;
}

async function answer() {
  const said = by("sampling").elements.seed.value;
  const seed = said === "" ? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 : Number(said);
  const control = (running = new AbortController());
  const started = performance.now();
  const message = { role: "assistant", content: "", reasoning: "", calls: [], marks: [], seed, running: true };
  const body = asked(seed);
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
  answered();
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
