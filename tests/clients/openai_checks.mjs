// The official OpenAI client for Node against running servers: node openai_checks.mjs URL MODULE THINKER, the last being
// one whose model reasons.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const [url, module, thinker] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(module).href);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "sesame", maxRetries: 0 });
const reasoner = new OpenAI({ baseURL: `${thinker}/v1`, apiKey: "sesame", maxRetries: 0 });
const messages = [{ role: "user", content: "a loop" }];
const call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>';
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      parameters: {
        type: "object",
        properties: { city: { enum: ["Rome", "Oslo"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];

const checks = {
  async models() {
    const models = [];
    for await (const model of client.models.list()) models.push(model.id);
    assert.deepEqual(models, ["demo"]);
    assert.equal((await client.models.retrieve("demo")).id, "demo");
  },
  async completions() {
    const asked = { model: "demo", prompt: "def f(", max_tokens: 12, seed: 4 };
    const whole = await client.completions.create(asked);
    let text = "";
    for await (const chunk of await client.completions.create({ ...asked, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, whole.choices[0].text);
    assert.equal(whole.usage.completion_tokens, 12);
  },
  async chat() {
    const asked = { model: "demo", messages, max_tokens: 12, seed: 4 };
    const whole = await client.chat.completions.create(asked);
    const stream = client.chat.completions.stream(asked);
    assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  },
  async tools() {
    const asked = { model: "demo", messages, tools, max_tokens: 80, structured_outputs: { choice: [call] } };
    const whole = await client.chat.completions.create(asked);
    assert.deepEqual(JSON.parse(whole.choices[0].message.tool_calls[0].function.arguments), { city: "Rome" });
    const final = await client.chat.completions.stream(asked).finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
    assert.equal(final.choices[0].finish_reason, "tool_calls");
    const forced = await client.chat.completions.create({ model: "demo", messages, tools, tool_choice: "required", max_tokens: 120, seed: 1 });
    assert.ok(["Rome", "Oslo"].includes(JSON.parse(forced.choices[0].message.tool_calls[0].function.arguments).city));
  },
  async structured() {
    const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
    const answer = await client.chat.completions.create({
      model: "demo",
      messages,
      max_tokens: 120,
      seed: 1,
      response_format: { type: "json_schema", json_schema: { name: "answer", schema } },
    });
    assert.equal(typeof JSON.parse(answer.choices[0].message.content).ok, "boolean");
  },
  async responses() {
    const asked = { model: "demo", input: "a loop", max_output_tokens: 12, temperature: 0 };
    const whole = await client.responses.create(asked);
    let text = "";
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
    assert.ok(text.length > 0);
  },
  async responseTools() {
    const parameters = { ...tools[0].function.parameters };
    const look = { type: "function", name: "look", strict: true, parameters };
    const space = { type: "namespace", name: "mail", description: "Letters.", tools: [look] };
    const asked = { model: "demo", input: "a loop", tools: [space], tool_choice: "required", max_output_tokens: 60, seed: 1 };
    asked.parallel_tool_calls = false;
    const [call] = (await client.responses.create(asked)).output;
    assert.deepEqual([call.type, call.namespace, call.name], ["function_call", "mail", "look"]);
    const [streamed] = (await client.responses.stream(asked).finalResponse()).output;
    assert.equal(streamed.arguments, call.arguments);
    const output = { type: "function_call_output", call_id: call.call_id, output: "Sunny." };
    const again = await client.responses.create({ model: "demo", input: [...messages, call, output], max_output_tokens: 1 });
    assert.ok(again.usage.input_tokens > 0);
  },
  async errors() {
    const bad = client.chat.completions.create({ model: "demo", messages, temperature: -1 });
    await assert.rejects(bad, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
    const unknown = client.chat.completions.create({ model: "gpt-4", messages });
    await assert.rejects(unknown, (error) => error instanceof OpenAI.NotFoundError && Boolean(error.requestID));
    const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
  // Whatever comes can be sent again, and the model reads all of it.
  async chatThereAndBack() {
    const asked = { model: "demo", messages, max_tokens: 60, temperature: 0, chat_template_kwargs: { enable_thinking: true } };
    const format = { type: "json_schema", json_schema: { name: "opinion", schema: { enum: ["good", "bad"] } } };
    const forced = { model: "demo", messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 120, seed: 1 };
    const made = [
      (await reasoner.chat.completions.create(asked)).choices[0].message,
      (await reasoner.chat.completions.parse({ ...asked, response_format: format })).choices[0].message,
      await reasoner.chat.completions.stream(asked).finalMessage(),
      await reasoner.chat.completions.stream({ ...asked, response_format: format }).finalMessage(),
      (await reasoner.chat.completions.create(forced)).choices[0].message,
      (await reasoner.chat.completions.parse({ ...forced, tools: [{ ...tools[0], function: { ...tools[0].function, strict: true } }] }))
        .choices[0].message,
      await reasoner.chat.completions.stream(forced).finalMessage(),
    ];
    for (const message of made) {
      const called = (message.tool_calls ?? []).map((one) => ({ role: "tool", tool_call_id: one.id, content: "Sunny." }));
      const history = [messages[0], message, ...called, messages[0]];
      const answer = await reasoner.chat.completions.create({ model: "demo", messages: history, max_tokens: 1, prompt_logprobs: 0 });
      const prompt = answer.choices[0].prompt_logprobs.slice(1).map((entry) => Object.values(entry)[0].decoded_token).join("");
      const expected = [message.content, message.reasoning_content && `<think>${message.reasoning_content}</think>`];
      for (const one of message.tool_calls ?? []) expected.push(one.function.name, ...Object.values(JSON.parse(one.function.arguments)));
      assert.ok(expected.filter(Boolean).length >= 2);
      for (const text of expected.filter(Boolean)) assert.ok(prompt.includes(text), `${text} is not in ${prompt}`);
    }
  },
  async responsesThereAndBack() {
    const asked = { model: "demo", input: "a loop", max_output_tokens: 60, temperature: 0, chat_template_kwargs: { enable_thinking: true } };
    asked.include = ["message.output_text.logprobs"];
    const text = { format: { type: "json_schema", name: "opinion", schema: { enum: ["good", "bad"] } } };
    const made = [
      await reasoner.responses.create(asked),
      await reasoner.responses.create({ ...asked, max_output_tokens: 3 }),
      await reasoner.responses.parse({ ...asked, text }),
      await reasoner.responses.stream({ ...asked, text }).finalResponse(),
    ];
    for (const response of made) {
      const [thought, said] = response.output;
      assert.equal(thought.type, "reasoning");
      const message = { role: "assistant", content: said?.content[0].text ?? "", reasoning_content: thought.content[0].text };
      const plain = await fetch(`${thinker}/tokenize`, {
        method: "POST",
        headers: { "Content-Type": "application/json", Authorization: "Bearer sesame" },
        body: JSON.stringify({ messages: [messages[0], message, messages[0]] }),
      });
      const input = [messages[0], ...response.output, messages[0]];
      const again = await reasoner.responses.create({ model: "demo", input, max_output_tokens: 1 });
      assert.equal(again.usage.input_tokens, (await plain.json()).count);
    }
  },
  // Field by field, as the client puts them together.
  async streamsAddUp() {
    const apart = ["id", "call_id", "created", "created_at", "completed_at", "parsed", "parsed_arguments", "index", "stop_reason", "output_parsed"];
    apart.push("reasoning_content"); // which this client does not know: it keeps the last part of it
    const plain = (answer) =>
      JSON.parse(JSON.stringify(answer, (key, value) => (apart.includes(key) || value === null || value?.length === 0 ? undefined : value)));
    const thinks = { chat_template_kwargs: { enable_thinking: true } };
    const chat = { model: "demo", messages, max_tokens: 60, temperature: 0 };
    const calls = [call, `So: ${call}`].map((text) => ({ tools, structured_outputs: { choice: [text] } }));
    for (const more of [thinks, { logprobs: true }, ...calls]) {
      const asked = { ...chat, ...more };
      await reasoner.chat.completions.create(asked);
      const whole = await reasoner.chat.completions.create(asked); // finds the prompt in the cache, as the stream does
      const streamed = await reasoner.chat.completions.stream({ ...asked, stream_options: { include_usage: true } }).finalChatCompletion();
      assert.deepEqual(plain(streamed), plain(whole));
    }
    const respond = { model: "demo", input: "a loop", max_output_tokens: 60, temperature: 0 };
    const look = { type: "function", name: "look", strict: true, parameters: tools[0].function.parameters };
    for (const more of [thinks, { tools: [look], tool_choice: "required", parallel_tool_calls: false }]) {
      await reasoner.responses.create({ ...respond, ...more });
      const whole = await reasoner.responses.create({ ...respond, ...more });
      assert.deepEqual(plain(await reasoner.responses.stream({ ...respond, ...more }).finalResponse()), plain(whole));
    }
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`${name}: ok`);
}
