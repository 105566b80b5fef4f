// The pictures of the engine. A step is a column. The requests' picture is made of pixels, one per request and step, and
// then enlarged, so that hundreds of requests take no longer than a few; so is the map of the cache.

import { MOST_ROWS } from "./steps.js";

let colors = {};

export function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["decode", "prefill", "drafts", "free", "owned", "shared", "cached", "text", "line", "bad"]) {
    const css = style.getPropertyValue(`--${name}`).trim();
    const rgb = parseInt(css.slice(1), 16);
    // Pixels are little-endian: alpha, blue, green, red.
    colors[name] = { css, pixel: ((255 << 24) | ((rgb & 255) << 16) | (rgb & 0xff00) | (rgb >> 16)) >>> 0 };
  }
}

function context(canvas) {
  const scale = devicePixelRatio;
  const [width, height] = [Math.round(canvas.clientWidth * scale), Math.round(canvas.clientHeight * scale)];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const ctx = canvas.getContext("2d");
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  return ctx;
}

const small = document.createElement("canvas");

function enlarge(ctx, image, width, height) {
  if (small.width !== image.width || small.height !== image.height) [small.width, small.height] = [image.width, image.height];
  small.getContext("2d").putImageData(image, 0, 0);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(small, 0, 0, width, height);
}

// How many rows are shown, and how high each is.
export function rowsOf(canvas, steps) {
  const rows = Math.max(8, Math.min(MOST_ROWS, steps.most));
  return { rows, height: Math.min(14, canvas.clientHeight / rows) };
}

export function lanes(canvas, steps, shown, zoom, chosen) {
  const ctx = context(canvas);
  const { rows, height } = rowsOf(canvas, steps);
  const columns = Math.max(1, shown.length);
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const { pixel } = colors.decode;
  shown.forEach((step, x) => {
    for (const row of step.rows) if (row < rows) pixels[row * columns + x] = pixel;
    step.works.forEach((work, n) => {
      const color = work[3] ? colors.prefill : work[6] ? colors.drafts : colors.decode;
      if (step.workRows[n] < rows) pixels[step.workRows[n] * columns + x] = color.pixel;
    });
  });
  enlarge(ctx, image, columns * zoom, rows * height);
  mark(ctx, canvas, shown, zoom, chosen);
  canvas.dataset.drawn = Number(canvas.dataset.drawn ?? 0) + 1;
}

function mark(ctx, canvas, shown, zoom, chosen) {
  const x = shown.indexOf(chosen);
  if (x < 0) return;
  ctx.strokeStyle = colors.text.css;
  ctx.strokeRect(x * zoom - 0.5, 0.5, Math.max(2, zoom + 1), canvas.clientHeight - 1);
}

function label(ctx, text, y) {
  ctx.fillStyle = colors.text.css;
  ctx.font = "11px system-ui";
  ctx.fillText(text, 4, y);
}

export function tokens(canvas, shown, zoom, budget, chosen) {
  const ctx = context(canvas);
  const most = Math.max(budget ?? 0, 1, ...shown.map((step) => step.tokens));
  const { clientWidth: width, clientHeight: height } = canvas;
  const unit = (height - 4) / most;
  const bar = Math.max(1, zoom - 0.5);
  ctx.fillStyle = colors.prefill.css;
  shown.forEach((step, x) => ctx.fillRect(x * zoom, height - step.tokens * unit, bar, (step.tokens - step.decodes.length) * unit));
  ctx.fillStyle = colors.decode.css;
  shown.forEach((step, x) => ctx.fillRect(x * zoom, height - step.decodes.length * unit, bar, step.decodes.length * unit));
  if (budget) {
    ctx.fillStyle = colors.bad.css;
    ctx.fillRect(0, height - budget * unit, width, 1);
  }
  label(ctx, `${most}${most === budget ? " (budget)" : ""}`, 11);
  mark(ctx, canvas, shown, zoom, chosen);
}

export function times(canvas, shown, zoom, chosen) {
  const ctx = context(canvas);
  const gap = Math.max(1, ...shown.map((step) => step.gap ?? 0));
  const first = Math.max(1, ...shown.map((step) => step.ttft ?? 0));
  const { clientHeight: height } = canvas;
  const y = (value, most) => height - 2 - (value / most) * (height - 16);
  ctx.strokeStyle = colors.decode.css;
  ctx.beginPath();
  shown.forEach((step, x) => {
    if (step.gap === null) return;
    if (shown[x - 1]?.gap == null) ctx.moveTo(x * zoom, y(step.gap, gap));
    ctx.lineTo(x * zoom + zoom / 2, y(step.gap, gap));
  });
  ctx.stroke();
  ctx.fillStyle = colors.prefill.css;
  shown.forEach((step, x) => {
    if (step.ttft !== null) ctx.fillRect(x * zoom - 1, y(step.ttft, first) - 2, 4, 4);
  });
  label(ctx, `ITL up to ${gap.toFixed(1)} ms, TTFT up to ${first.toFixed(0)} ms`, 11);
  mark(ctx, canvas, shown, zoom, chosen);
}

export function blocks(canvas, map, states) {
  const ctx = context(canvas);
  if (!map) return;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const size = Math.max(1, Math.floor(Math.sqrt((width * height) / map.cells.length)));
  const columns = Math.max(1, Math.floor(width / size));
  const rows = Math.ceil(map.cells.length / columns);
  const side = Math.min(size, height / rows);
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const shades = states.map((state) => colors[state].pixel);
  for (let i = 0; i < map.cells.length; i++) pixels[i] = shades[map.cells.charCodeAt(i) - 48];
  enlarge(ctx, image, columns * size, rows * side);
  if (side <= 3) return;
  for (let x = 1; x <= columns; x++) ctx.clearRect(x * size - 1, 0, 1, height);
  for (let y = 1; y <= rows; y++) ctx.clearRect(0, y * side - 1, width, 1);
}
