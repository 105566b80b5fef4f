// The steps that have been seen, up to 10,000, and which row of the picture each request has.

export const MOST = 10000;
export const MOST_ROWS = 512;
const MOST_MAPS = 500;

export class Steps {
  constructor() {
    this.clear();
  }

  clear() {
    this.all = [];
    this.ids = new Map(); // number -> id
    this.rows = new Map(); // number -> row, of requests that have not ended
    this.taken = [];
    this.ended = [];
    this.maps = []; // the newest last
    this.nth = -1; // of the last end
    this.hello = null;
    this.lost = 0;
    this.most = 0; // rows at a time so far
  }

  // Take a record of the server's, of any kind.
  take(record) {
    if (record.kind === "step") this.step(record);
    else if (record.kind === "end") this.end(record);
    else if (record.kind === "map") {
      this.maps.push(record);
      if (this.maps.length > MOST_MAPS) this.maps.shift();
    }
    else {
      if (record.kind === "hello") {
        if (this.hello && this.hello.server !== record.server) this.clear();
        this.hello = record;
      } else this.lost += record.records;
      for (const [id, number] of Object.entries(record.requests)) this.ids.set(number, id);
      const open = new Set(Object.values(record.requests));
      for (const number of this.rows.keys()) if (!open.has(number)) this.leave(number);
    }
  }

  step(record) {
    const last = this.all.at(-1);
    if (last && record.index <= last.index) return; // kept by the server, and seen already
    for (const [number, id] of Object.entries(record.new)) this.ids.set(Number(number), id);
    record.end = record.start + record.ms;
    record.gap = last && last.running && record.decodes.length && record.index === last.index + 1 ? record.end - last.end : null;
    record.rows = Uint16Array.from(record.decodes, (number) => this.row(number));
    record.decodes = Int32Array.from(record.decodes);
    record.at = Int32Array.from(record.at);
    record.workRows = record.works.map(([number]) => this.row(number));
    record.ttft = null;
    this.all.push(record);
    if (this.all.length > MOST + 500) {
      this.all.splice(0, this.all.length - MOST);
      const seen = new Set(this.rows.keys());
      for (const step of this.all) {
        for (const number of step.decodes) seen.add(number);
        for (const [number] of step.works) seen.add(number);
      }
      for (const number of this.ids.keys()) if (!seen.has(number)) this.ids.delete(number);
    }
  }

  row(number) {
    let row = this.rows.get(number);
    if (row === undefined) {
      row = this.taken.findIndex((taken) => !taken);
      if (row < 0) row = this.taken.length;
      this.taken[row] = true;
      this.rows.set(number, row);
      this.most = Math.max(this.most, row + 1);
    }
    return row;
  }

  leave(number) {
    const row = this.rows.get(number);
    if (row === undefined) return;
    this.taken[row] = false;
    this.rows.delete(number);
  }

  end(record) {
    this.leave(record.number);
    if (record.nth <= this.nth) return; // kept by the server, and seen already
    this.nth = record.nth;
    if (record.number !== null) this.ids.set(record.number, record.id); // the step that named it may be missing
    this.ended.push(record);
    if (this.ended.length > MOST) this.ended.splice(0, 1000);
    if (record.ttft === null) return;
    const at = this.find(record.arrival + record.ttft);
    if (at) at.ttft = Math.max(at.ttft ?? 0, record.ttft);
  }

  // So many of the newest steps, and none from before a time when nobody watched.
  recent(most) {
    let from = this.all.length - 1;
    while (from > 0 && from > this.all.length - most && this.all[from - 1].index === this.all[from].index - 1) from--;
    return this.all.slice(Math.max(0, from));
  }

  // The last map that was made up to a step.
  mapAt(index) {
    return this.maps.findLast((map) => map.step <= index) ?? null;
  }

  // The step during which a moment was, or the one before it.
  find(moment) {
    return this.all[this.count((step) => step.start <= moment) - 1];
  }

  // How many steps there are up to an index.
  upTo(index) {
    return this.count((step) => step.index <= index);
  }

  // How many steps of the first ones are such; none of those after them is.
  count(such) {
    let [low, high] = [0, this.all.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (such(this.all[middle])) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
