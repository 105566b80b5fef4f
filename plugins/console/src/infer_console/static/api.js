// Requests to the server that this page came from, and their answers as events.

let refused = () => {};

export function onRefused(call) {
  refused = call;
}

let chosen = ""; // the model that the page is about, where the server has several

export function choose(model) {
  chosen = model;
}

// The address of what the console's own API says of the model.
export function ofModel(path, query = {}) {
  const all = new URLSearchParams(chosen ? { ...query, model: chosen } : query);
  return all.size ? `${path}?${all}` : path;
}

// The header tells the server that the page itself asks, and no page from elsewhere in its name.
export async function call(path, { body, ...options } = {}) {
  const headers = { "X-Infer-Console": "1" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    credentials: "same-origin",
    cache: "no-store",
    ...options,
  });
  if (response.ok) return response;
  if (response.status === 401 && path !== "console/api/login") refused();
  let text = `${response.status} ${response.statusText}`;
  try {
    text = (await response.json()).error.message;
  } catch {
    // A proxy's answer need not be JSON; its status says enough.
  }
  throw new Error(text);
}

// The data of each server-sent event. ``heard`` is called for whatever comes, also for what is no event.
export async function* events(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
