// Uses the official JavaScript clients for files, batches and background responses as their users
// do, and prints the results as JSON.
//   node batches.mjs BASE_URL WORK KEY [FILE]
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import fs from "node:fs";

const [baseURL, work, apiKey, input] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey });
const anthropic = new Anthropic({ baseURL, apiKey });
const POLLS = 600;

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

async function polled(look, ended) {
  for (let left = POLLS; left; left--) {
    const found = await look();
    if (ended(found)) return found;
    await pause(100);
  }
  throw new Error("it does not end");
}

async function status(promise) {
  try {
    await promise;
  } catch (error) {
    return error.status;
  }
  return null;
}

async function ids(page) {
  const found = [];
  for await (const one of page) found.push(one.id);
  return found;
}

const works = {
  async batch() {
    const file = await client.files.create({ file: fs.createReadStream(input), purpose: "batch" });
    const made = await client.batches.create({
      input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
    });
    const over = ["completed", "failed", "cancelled", "expired"];
    const batch = await polled(
      () => client.batches.retrieve(made.id), (one) => over.includes(one.status),
    );
    return {
      batch,
      output: await (await client.files.content(batch.output_file_id)).text(),
      listed: await ids(client.batches.list({ limit: 1 })),
      files: (await ids(client.files.list())).includes(file.id),
      filename: (await client.files.retrieve(file.id)).filename,
      conflict: await status(client.batches.cancel(batch.id)),
      deleted: (await client.files.delete(file.id)).deleted,
      gone: await status(client.files.retrieve(file.id)),
    };
  },
  // Leaves after some events, and goes on behind them; after a cut, too.
  async background() {
    const events = [];
    let [id, cuts] = [null, 0];
    const read = async (stream, most = Infinity) => {
      for await (const event of stream) {
        events.push(event);
        id ??= event.response?.id;
        if (events.length === 12) console.log("reading");
        if (events.length >= most) break;
      }
    };
    const ended = () => /^response\.(completed|incomplete|failed)$/.test(events.at(-1)?.type);
    await read(
      await client.responses.create({
        model: "demo", input: "tell me a story", background: true, stream: true,
        max_output_tokens: 60,
      }),
      6,
    );
    for (let left = POLLS; left && !ended(); left--) {
      try {
        const starting_after = events.at(-1).sequence_number;
        await read(await client.responses.retrieve(id, { stream: true, starting_after }));
      } catch (error) {
        if (error.status) throw error;
        cuts++;
        await pause(200);
      }
    }
    const stored = await client.responses.retrieve(id);
    const second = await client.responses.create({
      model: "demo", input: "another", background: true, max_output_tokens: 4000,
    });
    const cancelled = await client.responses.cancel(second.id);
    await client.responses.delete(id);
    return {
      id,
      cuts,
      numbers: events.map((one) => one.sequence_number),
      text: events.map((one) => (one.type === "response.output_text.delta" ? one.delta : "")).join(""),
      stored: stored.output_text,
      cancelled: cancelled.status,
      gone: await status(client.responses.retrieve(id)),
    };
  },
  async messageBatch() {
    const { batches } = anthropic.messages;
    const requests = [0, 1, 2, 3].map((number) => ({
      custom_id: `r-${number}`,
      params: {
        model: number === 3 ? "unknown" : "test",
        max_tokens: 12,
        messages: [{ role: "user", content: `Tell me of the number ${number}.` }],
      },
    }));
    const made = await batches.create({ requests });
    const batch = await polled(
      () => batches.retrieve(made.id), (one) => one.processing_status === "ended",
    );
    const results = {};
    for await (const one of await batches.results(batch.id)) results[one.custom_id] = one.result;
    return {
      counts: batch.request_counts,
      results,
      listed: await ids(batches.list({ limit: 1 })),
      id: batch.id,
      cancelled: (await batches.cancel(batch.id)).processing_status,
      deleted: (await batches.delete(batch.id)).type,
      gone: await status(batches.retrieve(batch.id)),
    };
  },
};

console.log(JSON.stringify(await works[work]()));
