// The page: its views, and the form that asks for a key where the server has keys.

import { setUp as about } from "./about.js";
import { call, choose, ofModel, onRefused } from "./api.js";
import { setUp as chat, turnTo } from "./chat.js";
import { by, el, notice } from "./dom.js";
import { restart, show as watch } from "./live.js";
import { readModel, writeModel } from "./store.js";

const VIEWS = ["chat", "live", "about"];
const tabs = new BroadcastChannel("infer.console"); // to the others of this browser, which share the cookie
let ready = false;
let latest = 0;

function select(view) {
  for (const each of VIEWS) {
    const chosen = each === view;
    by(each).hidden = !(chosen && ready);
    by(`tab-${each}`).setAttribute("aria-selected", String(chosen));
    by(`tab-${each}`).tabIndex = chosen ? 0 : -1;
  }
  by("tip").hidden = true;
  watch(ready && view === "live", () => enter().catch((error) => notice(error.message)));
}

const current = () => VIEWS.find((view) => `#${view}` === location.hash) ?? "chat";

function ask() {
  ready = false;
  select(current());
  by("login").hidden = false;
  by("logout").hidden = true;
  by("key").focus();
}

// Show what the server says of itself, and of its models if it has several.
async function refresh() {
  const own = ++latest;
  const served = await (await call(ofModel("console/api/server"))).json();
  if (own !== latest) return; // another model has been chosen meanwhile
  const several = Boolean(served.models);
  by("logout").hidden = !served.keys;
  by("model").textContent = several ? "" : served.model;
  by("models").hidden = !several;
  if (several) {
    choose(served.model);
    list(served);
  }
  document.title = `${served.model} · infer`;
  chat(served, () => {
    if (several) refresh().catch((error) => notice(error.message));
  });
  about(served);
}

function list({ model, models }) {
  const options = models.map(({ name, state }) => el("option", { value: name }, state === "loaded" ? name : `${name} (${state})`));
  by("models").replaceChildren(...options);
  by("models").value = model;
}

async function enter() {
  await refresh();
  ready = true;
  by("login").hidden = true;
  select(current());
  if (!by("chat").hidden) by("text").focus();
}

by("models").onchange = async () => {
  const name = by("models").value;
  choose(name);
  turnTo(name);
  writeModel(name);
  restart();
  await refresh().catch((error) => notice(error.message));
};

for (const view of VIEWS) {
  by(`tab-${view}`).onclick = () => {
    location.hash = view;
  };
  by(`tab-${view}`).onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: VIEWS.length - 1 }[event.key];
    if (!step) return;
    const next = VIEWS[(VIEWS.indexOf(view) + step) % VIEWS.length];
    location.hash = next;
    by(`tab-${next}`).focus();
  };
}
addEventListener("hashchange", () => select(current()));

by("login").onsubmit = async (event) => {
  event.preventDefault();
  by("login-error").textContent = "";
  try {
    await call("console/api/login", { body: { key: by("key").value } });
    by("key").value = "";
    await enter();
    tabs.postMessage("in");
  } catch (error) {
    by("login-error").textContent = error.message;
  }
};
by("logout").onclick = async () => {
  await call("console/api/logout", { body: {} });
  ask();
  tabs.postMessage("out");
};
tabs.onmessage = ({ data }) => {
  if (data === "out") ask();
  else if (!ready) enter().catch((error) => notice(error.message));
};

onRefused(ask);
choose(readModel());
select(current());
enter().catch((error) => {
  if (by("login").hidden) notice(error.message);
});
