// Uses Ollama's official JavaScript client as its users do, and prints the results as JSON.
//   node ollama.mjs HOST WORK
import { Ollama } from "ollama";

const [host, work] = process.argv.slice(2);
const client = new Ollama({ host });
const options = { num_predict: 24, temperature: 0, seed: 7 };
const chat = { model: "demo", messages: [{ role: "user", content: "hello there" }], options };

async function read(stream, textOf) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return { text: parts.map(textOf).join(""), parts: parts.length, last: parts.at(-1) };
}

const works = {
  async chat() {
    return await client.chat(chat);
  },
  async streaming() {
    return await read(await client.chat({ ...chat, stream: true }), (part) => part.message.content);
  },
  async generate() {
    const asked = { model: "demo", prompt: "hello there", options };
    return {
      plain: await client.generate(asked),
      stream: await read(await client.generate({ ...asked, stream: true }), (part) => part.response),
    };
  },
};

console.log(JSON.stringify(await works[work]()));
