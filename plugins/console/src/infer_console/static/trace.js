// The steps as a trace of Chrome's format, which Perfetto (ui.perfetto.dev) opens.

const ENGINE = 1;
const REQUESTS = 2;

export function trace(steps) {
  const events = [name(ENGINE, 0, "process_name", "engine"), name(REQUESTS, 0, "process_name", "requests")];
  const open = new Map(); // number -> the event of the decodes that go on
  for (const step of steps.all) {
    const [ts, dur] = [step.start * 1000, step.ms * 1000];
    const { index, tokens, passes, running, waiting, free } = step;
    events.push({ ph: "X", pid: ENGINE, tid: 0, ts, dur, name: `step ${index}`, args: { tokens, passes } });
    events.push({ ph: "C", pid: ENGINE, tid: 0, ts, name: "requests", args: { running, waiting } });
    events.push({ ph: "C", pid: ENGINE, tid: 0, ts, name: "free positions", args: { free } });
    const here = new Set(step.decodes);
    for (const number of open.keys()) if (!here.has(number)) open.delete(number);
    step.decodes.forEach((number, n) => {
      const before = open.get(number);
      if (before) {
        before.dur = ts + dur - before.ts;
        before.args.tokens += 1;
        return;
      }
      const args = { request: steps.ids.get(number), start: step.at[n], tokens: 1 };
      const event = { ph: "X", pid: REQUESTS, tid: step.rows[n], ts, dur, name: "decode", args };
      open.set(number, event);
      events.push(event);
    });
    step.works.forEach(([number, start, length, prefill, , proposed, accepted], n) => {
      const args = { request: steps.ids.get(number), start, length, proposed, accepted };
      events.push({ ph: "X", pid: REQUESTS, tid: step.workRows[n], ts, dur, name: prefill ? "prefill" : "verify", args });
    });
  }
  return { displayTimeUnit: "ms", traceEvents: events };
}

function name(pid, tid, kind, text) {
  return { ph: "M", pid, tid, name: kind, args: { name: text } };
}
