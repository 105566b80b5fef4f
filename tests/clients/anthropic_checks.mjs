// The official Anthropic client for Node against running servers: node anthropic_checks.mjs URL MODULES SCRIPT, the model of the
// first server being scripted.
import assert from "node:assert/strict";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, modules, script] = process.argv.slice(2);
const sdk = (path) => import(pathToFileURL(join(modules, "@anthropic-ai/sdk", path)).href);
const { default: Anthropic } = await sdk("index.mjs");
const { betaTool } = await sdk("helpers/beta/json-schema.mjs");
const { said, plain, thought, key, tool } = JSON.parse(script);
const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const asked = { model: "demo", max_tokens: 1500, thinking: { type: "enabled", budget_tokens: 1024 } };
const hi = { role: "user", content: "hi" };
const more = { role: "user", content: "more" };
const tools = [{ name: tool.name, description: tool.description, input_schema: tool.parameters }];
const weather = ({ city }) => `Sunny in ${city}.`;

// A message without its ids, what the client itself adds, and what is null.
function same(message) {
  const drop = (key, value) => (["id", "parsed_output"].includes(key) || value === null ? undefined : value);
  return JSON.parse(JSON.stringify(message, drop));
}

async function both(body, messages = client.messages) {
  await messages.create(body);
  const whole = await messages.create(body); // finds the prompt in the cache, as the stream does
  const streamed = await messages.stream(body).finalMessage();
  assert.deepEqual(same(streamed), same(whole));
  return [whole, streamed];
}

const checks = {
  async models() {
    const models = [];
    for await (const model of client.models.list()) models.push(model.id);
    assert.deepEqual(models, ["demo"]);
  },
  async text() {
    for (const messages of [client.messages, client.beta.messages]) {
      const [whole] = await both({ ...asked, messages: [hi] }, messages);
      assert.deepEqual(
        whole.content.map(({ type, thinking, text }) => [type, thinking ?? text]),
        [["thinking", thought], ["text", plain]],
      );
      assert.equal(whole.stop_reason, "end_turn");
    }
  },
  async events() {
    const text = [];
    const stream = client.messages.stream({ ...asked, messages: [hi] }).on("text", (delta) => text.push(delta));
    assert.equal(await stream.finalText(), plain);
    assert.equal(text.join(""), plain);
  },
  async turns() {
    for (const pick of [0, 1]) {
      const messages = [hi];
      let message;
      do {
        message = (await both({ ...asked, tools, messages }))[pick];
        messages.push({ role: message.role, content: message.content });
        const calls = message.content.filter((block) => block.type === "tool_use");
        const results = calls.map(({ id, input }) => ({ type: "tool_result", tool_use_id: id, content: weather(input) }));
        if (results.length) messages.push({ role: "user", content: results });
      } while (message.stop_reason === "tool_use");
      assert.equal(message.content.at(-1).text, said);
      const { input_tokens: counted } = await client.messages.countTokens({ ...asked, max_tokens: undefined, tools, messages: [...messages, more] });
      const { usage } = await client.messages.create({ ...asked, tools, messages: [...messages, more] });
      assert.equal(usage.input_tokens + usage.cache_read_input_tokens, counted);
    }
  },
  async toolRunner() {
    const run = betaTool({ name: tool.name, description: tool.description, inputSchema: tool.parameters, run: weather });
    for (const stream of [false, true]) {
      const runner = client.beta.messages.toolRunner({ ...asked, tools: [run], messages: [hi], stream });
      const final = await runner.runUntilDone();
      assert.equal(final.content.at(-1).text, said);
      const messages = [...runner.params.messages];
      if (messages.at(-1).role !== "assistant") messages.push({ role: "assistant", content: final.content });
      await client.beta.messages.create({ ...asked, tools, messages: [...messages, more] });
    }
  },
  async errors() {
    const bad = client.messages.create({ ...asked, messages: [hi], temperature: -1 });
    await assert.rejects(bad, (error) => error instanceof Anthropic.BadRequestError && /temperature/.test(error.message) && Boolean(error.requestID));
    const unknown = client.messages.create({ ...asked, messages: [hi], model: "claude" });
    await assert.rejects(unknown, (error) => error instanceof Anthropic.NotFoundError && error.error.error.type === "not_found_error");
    const stranger = new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.messages.create({ ...asked, messages: [hi] }), Anthropic.AuthenticationError);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`${name}: ok`);
}
