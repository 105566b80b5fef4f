// Ollama's official client for JavaScript: node ollama_checks.mjs URL MODULE CHECK OPTIONS, the last as JSON:
// a key, and the tool that is offered. Prints what the check found as JSON.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const [url, module, check, options] = process.argv.slice(2);
const { key, look } = JSON.parse(options);
const { Ollama } = await import(pathToFileURL(module).href);
const headers = key ? { Authorization: `Bearer ${key}` } : {};
const client = new Ollama({ host: url, headers });
const model = "demo";
const user = { role: "user", content: "hi" };

// What the parts of a stream add up to, as the client's users do it: texts joined, calls listed, the rest from the last part.
async function joined(stream) {
  const message = { role: "assistant", content: "" };
  let last;
  for await (const part of stream) {
    last = part;
    message.content += part.message.content;
    if (part.message.thinking) message.thinking = (message.thinking ?? "") + part.message.thinking;
    if (part.message.tool_calls) message.tool_calls = [...(message.tool_calls ?? []), ...part.message.tool_calls];
  }
  assert.equal(last.done, true);
  return { ...last, message };
}

// Fields that differ from call to call are left out.
function lasting({ created_at, total_duration, load_duration, prompt_eval_duration, eval_duration, prompt_eval_cached_count, ...rest }) {
  assert.ok(!Number.isNaN(Date.parse(created_at)));
  for (const part of [load_duration, prompt_eval_duration, eval_duration]) assert.ok(part > 0 && part <= total_duration);
  for (const call of rest.message?.tool_calls ?? []) delete call.id;
  return rest;
}

async function both(asked) {
  const whole = lasting(await client.chat({ model, ...asked }));
  assert.deepEqual(lasting(await joined(await client.chat({ model, ...asked, stream: true }))), whole);
  return whole;
}

const checks = {
  async drawn() {
    const options = { temperature: 0.8, seed: 3, num_predict: 30, top_k: 20 };
    const chat = await both({ messages: [user], options });
    const prompt = { model, prompt: "def f(", raw: true, options };
    const generated = await client.generate(prompt);
    let text = "";
    for await (const part of await client.generate({ ...prompt, stream: true })) text += part.response;
    assert.equal(text, generated.response);
    const format = { type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"], additionalProperties: false };
    const held = await both({ messages: [user], format, options: { num_predict: 100, seed: 5 } });
    const embedded = await client.embed({ model, input: ["one", "two"] });
    const old = await client.embeddings({ model, prompt: "one" });
    assert.deepEqual(old.embedding, embedded.embeddings[0]);
    return { chat, generated: generated.response, city: JSON.parse(held.message.content).city, embeddings: embedded.embeddings };
  },
  async tools() {
    const first = await both({ messages: [user], tools: [look] });
    const results = first.message.tool_calls.map((call, i) => ({ role: "tool", tool_name: call.function.name, content: `${i}` }));
    const next = await client.chat({ model, messages: [user, first.message, ...results], tools: [look], options: { num_predict: 1 } });
    return { first, next: next.prompt_eval_count };
  },
  async thinking() {
    const first = await both({ messages: [user], think: true });
    const next = await client.chat({ model, messages: [user, first.message, user], think: true, options: { num_predict: 1 } });
    return { first, next: next.prompt_eval_count };
  },
  async models() {
    const { models } = await client.list();
    const shown = await client.show({ model });
    const statuses = [];
    for await (const part of await client.pull({ model, stream: true })) statuses.push(part.status);
    const { version } = await client.version();
    return {
      models: models.map((each) => each.model),
      running: (await client.ps()).models.map((each) => each.model),
      capabilities: shown.capabilities,
      pulled: statuses.at(-1),
      version,
    };
  },
  async aborted() {
    const stream = await client.chat({ model, messages: [user], stream: true, options: { num_predict: 100000 } });
    let parts = 0;
    try {
      for await (const _ of stream) if (parts < 3 && ++parts === 3) stream.abort(); // more may have come with the third
    } catch (error) {
      return { parts, error: error.name };
    }
    return { parts };
  },
  async refused() {
    const errors = {};
    const asked = { model, messages: [user] };
    for (const [name, wrong] of Object.entries({ format: { format: { type: 3 } }, option: { options: { seed: "x" } }, model: { model: "other" } })) {
      try {
        await client.chat({ ...asked, ...wrong });
      } catch (error) {
        errors[name] = [error.status_code, error.message];
      }
    }
    return errors;
  },
};

console.log(JSON.stringify(await checks[check]()));
