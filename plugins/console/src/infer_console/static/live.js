// Watches the server's engine while its view is on the screen.

import { call, events, ofModel } from "./api.js";
import { appear, forget, redraw, say, take } from "./view.js";

const AGAIN_MS = 2000;
const SILENCE_MS = 40000; // the server sends something every 15 s, so that a connection is lost that is silent for longer

let control = null; // the AbortController while it watches
let wanted = false;
let replaced = () => {};

// Watch while ``visible``. ``call`` is called when another server has taken the place of the one that was watched.
export function show(visible, call) {
  [wanted, replaced] = [visible, call];
  appear(visible);
  watch();
}

function watch() {
  const on = wanted && !document.hidden;
  if (on && !control) follow((control = new AbortController()));
  if (!on && control) {
    control.abort();
    control = null;
  }
  if (on) redraw();
}

// Watch the engine of the model that has been chosen, and no longer the one before.
export function restart() {
  control?.abort();
  control = null;
  forget();
  watch();
}

async function follow(own) {
  while (own === control) {
    const silence = new AbortController();
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(new Error("no data from the server; reconnecting")), SILENCE_MS);
    };
    try {
      heard();
      const response = await call(ofModel("console/api/steps", { last: 2000 }), { signal: AbortSignal.any([own.signal, silence.signal]) });
      say("watching");
      for await (const data of events(response, heard)) {
        if (take(JSON.parse(data))) replaced();
      }
      say("the server closed the stream; reconnecting");
    } catch (error) {
      if (own !== control) return;
      say(error.message);
    } finally {
      clearTimeout(timer);
    }
    if (own === control) await new Promise((done) => setTimeout(done, AGAIN_MS));
  }
}

document.addEventListener("visibilitychange", watch);
