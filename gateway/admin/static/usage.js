// What callers use, as both pages draw it: limits as bars, use by day as columns, sums as tables.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { count, money, plain, plural } from "./format.js";
import { tableView } from "./table.js";

/** The share of a limit from which it is drawn as nearly used up. */
const NEARLY = 0.8;
/** Days of a chart that are drawn. */
const MOST_DAYS = 92;

/** Fields of limits, with what each is a number of. */
export const LIMITS = { rpm: "Requests a minute", tpm: "Tokens a minute", tokens_per_day: "Tokens a day",
  budget: "Money", concurrency: "Requests at one time" };
const WHOSE = { total: "of all callers", group: "of the group", user: "of the user" };

/** A time that the gateway told, as people read it. */
export function timeOf(text) {
  return text === null || text === undefined ? "never" : plain(text.replace("T", " ").replace(/(:\d\d)(\.\d+)?(Z|\+00:00)$/, " UTC"));
}

/** The whole of `reserved`, too: it is what running requests may still come to. */
export function shareOf(one) {
  return one.most > 0 ? (one.used + one.reserved) / one.most : 1;
}

/** The standing of limits, as `GET /v1/usage` and the admin API tell it. */
export function limitsView(standing) {
  if (standing.length === 0) return html`<p class="muted">No limit on use.</p>`;
  return html`<ul class="limits">${standing.map(limitView)}</ul>`;
}

function limitView(one) {
  const read = one.limit === "budget" ? money : count;
  const period = one.limit === "budget" ? ` a ${one.period}` : "";
  const name = `${LIMITS[one.limit] ?? plain(one.limit)}${period}${one.of in WHOSE ? `, ${WHOSE[one.of]}` : ""}`;
  const share = shareOf(one);
  const word = share >= 1 ? "used up" : share >= NEARLY ? "nearly used up" : "";
  return html`<li class="limit"><span class="what">${name}</span>
    <span class="told">${read(one.used)} of ${read(one.most)} used${one.reserved > 0 ? `, ${read(one.reserved)} reserved` : ""}, ${
      read(one.remaining)} left${resetOf(one)} ${word === "" ? nothing : html`<b class="slow">${word}</b>`}</span>
    <meter min="0" max="1" low=${NEARLY} high="0.999" optimum="0" .value=${Math.min(1, share)} aria-label=${name}></meter></li>`;
}

function resetOf(one) {
  if (one.resets_at === null) return "";
  return one.period === "minute" ? ", comes back within a minute" : `, begins anew ${timeOf(one.resets_at)}`;
}

/** Whether anything of this cost something; without prices nothing does, and money is left out. */
export function costs(rows) {
  return rows.some((row) => row.cost > 0);
}

/** Tokens of each day from `first` to `last` as columns, and its cost where there is any; `rows` have a `day`. */
export function daysView(rows, title, first, last) {
  const days = everyDay(rows, first, last).slice(-MOST_DAYS);
  if (rows.length === 0) return html`<p class="muted">Nothing was used.</p>`;
  return html`<div class="charts">${columnsView(days, `Tokens by day${title}`, count, [
    ["prompt_tokens", "prompts, below"], ["completion_tokens", "answers, above"]])}
    ${costs(days) ? columnsView(days, `Cost by day${title}`, money, [["cost", "cost"]]) : nothing}</div>`;
}

/** Each day from the first to the last, in order. */
function everyDay(rows, first, last) {
  const found = new Map();
  for (const row of rows) {
    const sum = found.get(row.day) ?? { day: row.day, prompt_tokens: 0, completion_tokens: 0, cost: 0 };
    for (const name of ["prompt_tokens", "completion_tokens", "cost"]) sum[name] += row[name];
    found.set(row.day, sum);
  }
  const days = [];
  for (let at = Date.parse(first); at <= Date.parse(last); at += 86_400_000) {
    const day = new Date(at).toISOString().slice(0, 10);
    days.push(found.get(day) ?? { day, prompt_tokens: 0, completion_tokens: 0, cost: 0 });
  }
  return days;
}

const [WIDTH, HEIGHT] = [600, 100];

function columnsView(days, title, read, series) {
  const sumOf = (day) => series.reduce((sum, [name]) => sum + day[name], 0);
  const most = Math.max(...days.map(sumOf), Number.MIN_VALUE);
  const dearest = days.find((day) => sumOf(day) === most) ?? days[0];
  const last = days.at(-1);
  const step = WIDTH / Math.max(days.length, 7);
  const words = `${title}, ${days[0].day} to ${last.day}: most ${read(sumOf(dearest))} on ${dearest.day}, last ${read(sumOf(last))}`;
  const columns = days.map((day, place) => {
    let top = HEIGHT;
    const parts = series.map(([name], number) => {
      const height = (HEIGHT * day[name]) / most;
      top -= height;
      return svg`<rect class="k${number + 1}" x=${place * step} y=${top} width=${Math.max(1, step - 2)} height=${height}></rect>`;
    });
    const told = series.map(([name, word]) => `${word} ${read(day[name])}`).join(", ");
    return svg`<g>${parts}<rect class="whole" x=${place * step} y="0" width=${step} height=${HEIGHT}><title>${day.day}: ${told}</title></rect></g>`;
  });
  return html`<figure><figcaption><h3>${title}</h3><p>${series.length === 1 ? nothing : series.map(([, word], number) => html`<span
      class="swatch"><i class="k${number + 1}" aria-hidden="true"></i>${word}</span>`)}<span class="muted">most ${read(most)}</span></p></figcaption>
    <svg class="columns" viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${words}>${columns}</svg>
    <p class="ends muted"><span>${days[0].day}</span>${days.length > 1 ? html`<span>${last.day}</span>` : nothing}</p></figure>`;
}

/** Sums in words. */
export function inWords(sums) {
  return [`${plural(sums.requests, "request")}${sums.failures > 0 ? `, ${count(sums.failures)} of them failed` : ""}`,
    `${count(sums.prompt_tokens)} tokens of prompts${sums.cached_tokens > 0 ? ` (${count(sums.cached_tokens)} from caches)` : ""}`,
    `${count(sums.completion_tokens)} of answers`, ...sums.cost > 0 ? [`cost ${money(sums.cost)}`] : []].join("; ");
}

/** A choice of [value, word] pairs. */
export function selectView(label, options, value, choose) {
  return html`<label>${label} <select @change=${(event) => choose(event.target.value)}>${options.map(([one, word]) => html`<option
    value=${one} .selected=${one === value}>${plain(word)}</option>`)}</select></label>`;
}

/** Sums by something, whose `key` names each row: `nameOf` draws its first cell. */
export function sumsView(rows, heading, key, nameOf, label) {
  return tableView(label, [heading, "#Requests", "#Failed", "#Prompt tokens", "#from caches", "#Answer tokens", costs(rows) ? "#Cost" : nothing],
    rows, (row) => [nameOf(row), count(row.requests), count(row.failures), count(row.prompt_tokens), count(row.cached_tokens),
      count(row.completion_tokens), money(row.cost)], { key: (row) => row[key] });
}
