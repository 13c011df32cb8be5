// OpenAI's client for Node: chat, stream, tools, structured output. Arguments: address, model. Throws when one is wrong.

const assert = require("node:assert");
const { OpenAI } = require("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Switch the lamp on, and name a city." }];
const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});

async function chatAndStream() {
  const fields = { model, messages, temperature: 0, max_tokens: 8 };
  const whole = await client.chat.completions.create(fields);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...fields, stream: true })) {
    text += chunk.choices[0].delta.content ?? "";
  }
  assert.ok(text);
  assert.strictEqual(text, whole.choices[0].message.content);
}

async function tools() {
  const parameters = object({ state: { enum: ["on", "off"] } });
  const reply = await client.chat.completions.create({
    model,
    messages,
    tools: [{ type: "function", function: { name: "set_lamp", parameters } }],
    tool_choice: "required",
    parallel_tool_calls: false,
    max_tokens: 200,
  });
  const [call] = reply.choices[0].message.tool_calls;
  assert.ok(["on", "off"].includes(JSON.parse(call.function.arguments).state));
}

async function structuredOutput() {
  const schema = object({ size: { enum: ["small", "large"] }, is_capital: { type: "boolean" } });
  const reply = await client.chat.completions.create({
    model,
    messages,
    response_format: { type: "json_schema", json_schema: { name: "city", schema, strict: true } },
    max_tokens: 60,
  });
  assert.strictEqual(typeof JSON.parse(reply.choices[0].message.content).is_capital, "boolean");
}

(async () => {
  await chatAndStream();
  await tools();
  await structuredOutput();
  console.log("chat, stream, tools, structured output");
})();
