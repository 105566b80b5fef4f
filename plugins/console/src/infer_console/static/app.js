// The page: its views, and the form that asks for a key where the server has keys.

import { setUp as about } from "./about.js";
import { call, onRefused } from "./api.js";
import { setUp as chat } from "./chat.js";
import { by, notice } from "./dom.js";
import { show as watch } from "./live.js";

const VIEWS = ["chat", "live", "about"];
const tabs = new BroadcastChannel("infer.console"); // to the others of this browser, which share the cookie
let ready = false;

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

async function enter() {
  const served = await (await call("console/api/server")).json();
  ready = true;
  by("login").hidden = true;
  by("logout").hidden = !served.keys;
  by("model").textContent = served.model;
  document.title = `${served.model} · infer`;
  chat(served);
  about(served);
  select(current());
  if (!by("chat").hidden) by("text").focus();
}

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
select(current());
enter().catch((error) => {
  if (by("login").hidden) notice(error.message);
});
