// The data stream of the admin API.

import { ApiError, ask, hasKey } from "./ask.js";

const SILENCE_SECONDS = 20;
const MOST_PAUSE_SECONDS = 15;
const MOST_EVENT_CHARACTERS = 64 * 1024 * 1024;

/** The server-sent events of a response, as [name, data] pairs. */
export async function* eventsOf(response, onPart = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onPart();
      text += value;
      let end = text.indexOf("\n\n");
      while (end >= 0) {
        const event = parseEvent(text.slice(0, end));
        if (event !== null) yield event;
        text = text.slice(end + 2);
        end = text.indexOf("\n\n");
      }
      if (text.length > MOST_EVENT_CHARACTERS) throw new Error("an event is too long");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length === 0 ? null : [name, data.join("\n")];
}

/** Follow the live view for ever; `take` gets each event, `tell` how the connection is. */
export async function follow(take, tell, waitForKey) {
  let pause = 1;
  for (;;) {
    const stopped = new AbortController();
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stopped.abort(), SILENCE_SECONDS * 1000);
    };
    try {
      alive();
      const response = await ask("GET", "admin/live", { signal: stopped.signal });
      for await (const [name, data] of eventsOf(response, alive)) {
        take(name, JSON.parse(data));
        if (name === "snapshot") {
          pause = 1;
          tell("live", "");
        }
      }
      tell("connecting", "");
      pause = 0.2;
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        tell("key", hasKey() ? "This key is not valid." : "");
        await waitForKey();
        pause = 0;
      } else {
        const words = error instanceof ApiError ? error.message : "The gateway does not answer.";
        tell("lost", words);
      }
    } finally {
      clearTimeout(timer);
      stopped.abort();
    }
    await new Promise((done) => setTimeout(done, pause * 1000));
    pause = Math.min(Math.max(1, 2 * pause), MOST_PAUSE_SECONDS);
  }
}
