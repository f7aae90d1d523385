// Uses the AI SDK as its users do, with its default API, and prints the results as JSON.
//   node ai_sdk.mjs BASE_URL WORK
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [baseURL, work] = process.argv.slice(2);
const model = createOpenAI({ baseURL, apiKey: "unused" })("demo");
const common = { model, prompt: "hello there", temperature: 0, maxRetries: 0 };
const city = jsonSchema({
  type: "object",
  properties: { city: { enum: ["paris", "rome"] } },
  required: ["city"],
  additionalProperties: false,
});
const weather = tool({
  description: "The weather of a city",
  inputSchema: city,
  execute: async ({ city }) => ({ city, sunny: true }),
});

async function read(stream) {
  const parts = [];
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    parts.push(part.type);
  }
  return parts;
}

const works = {
  async text() {
    const stream = streamText({ ...common, maxOutputTokens: 24 });
    const parts = await read(stream);
    const { outputTokens } = await stream.usage;
    return { parts, text: await stream.text, reason: await stream.finishReason, outputTokens };
  },
  async plain() {
    const { text, finishReason, usage } = await generateText({ ...common, maxOutputTokens: 24 });
    return { text, reason: finishReason, outputTokens: usage.outputTokens };
  },
  // The first step must call the tool, the second answers with its result in the prompt.
  async tool() {
    const stream = streamText({
      ...common,
      maxOutputTokens: 100,
      tools: { weather },
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    });
    const parts = await read(stream);
    const steps = await stream.steps;
    return {
      parts,
      calls: steps[0].toolCalls.map(({ toolName, input }) => ({ toolName, input })),
      results: steps[0].toolResults.map(({ output }) => output),
      reasons: steps.map(({ finishReason }) => finishReason),
      text: await stream.text,
    };
  },
  async object() {
    const output = Output.object({ schema: city });
    return (await generateText({ ...common, maxOutputTokens: 100, output })).output;
  },
};

console.log(JSON.stringify(await works[work]()));
