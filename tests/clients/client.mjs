// Uses the official JavaScript client as its users do, and prints the results as JSON.
//   node client.mjs BASE_URL WORK
import OpenAI from "openai";

const [baseURL, work] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused" });
const chat = {
  model: "demo",
  messages: [{ role: "user", content: "hello there" }],
  max_tokens: 24,
  temperature: 0,
  seed: 7,
};

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    const { status = null, code = null, message } = error;
    return { kind: error.constructor.name, status, code, message };
  }
  return null;
}

async function read(stream, enough = Infinity) {
  const seen = { texts: [], last: null };
  for await (const chunk of stream) {
    seen.last = chunk;
    seen.texts.push(chunk.choices[0]?.delta.content ?? "");
    if (seen.texts.length >= enough) break;
  }
  return seen;
}

const works = {
  async chat() {
    const { data, response } = await client.chat.completions.create(chat).withResponse();
    return {
      text: data.choices[0].message.content,
      tokens: data.usage.completion_tokens,
      node: response.headers.get("x-gateway-node"),
    };
  },
  async streaming() {
    const options = { stream: true, stream_options: { include_usage: true } };
    const { texts, last } = await read(await client.chat.completions.create({ ...chat, ...options }));
    return { text: texts.join(""), chunks: texts.length, tokens: last.usage.completion_tokens };
  },
  // The client's own accumulator, with a text that ends by itself and with a tool call.
  async responses() {
    const parameters = {
      type: "object",
      properties: { city: { enum: ["paris", "rome"] } },
      required: ["city"],
      additionalProperties: false,
    };
    const common = { model: "demo", input: "hello there", temperature: 0, max_output_tokens: 200 };
    const text = { format: { type: "json_schema", name: "city", schema: parameters, strict: true } };
    const tools = [{ type: "function", name: "weather", parameters, strict: true }];
    const results = [];
    for (const more of [{ text }, { tools, tool_choice: "required" }]) {
      const stream = client.responses.stream({ ...common, ...more });
      const deltas = [];
      stream.on("response.output_text.delta", (event) => deltas.push(event.delta));
      stream.on("response.function_call_arguments.delta", (event) => deltas.push(event.delta));
      results.push({ response: await stream.finalResponse(), deltas: deltas.join("") });
    }
    return results;
  },
  // Reads until the test kills the server behind the gateway.
  async broken() {
    const stream = await client.chat.completions.create({ ...chat, max_tokens: 15000, stream: true });
    console.log("streaming");
    return await failure(read(stream));
  },
};

console.log(JSON.stringify(await works[work]()));
