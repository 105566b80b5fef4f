// Watches the server's engine while its view is on the screen.

import { call, events } from "./api.js";
import { appear, redraw, say, take } from "./view.js";

const AGAIN_MS = 2000;

let control = null; // the AbortController while it watches
let wanted = false;

export function show(visible) {
  wanted = visible;
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

async function follow(own) {
  while (own === control) {
    try {
      const response = await call("console/api/steps?last=2000", { signal: own.signal });
      say("watching");
      for await (const data of events(response)) {
        take(JSON.parse(data));
      }
      say("the server has ended the stream");
    } catch (error) {
      if (error.name === "AbortError") return;
      say(error.message);
    }
    if (own === control) await new Promise((done) => setTimeout(done, AGAIN_MS));
  }
}

document.addEventListener("visibilitychange", watch);
