// Tables that scroll by themselves where the screen is narrower.

import { html } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { plain } from "./format.js";

/**
 * A table. A column that begins with "#" has numbers; the first cell of each row names the row, by which it keeps its
 * elements. Cells are foreign text, or what lit renders. `keys` name the rows where first cells are no text.
 */
export function tableView(label, columns, rows, keys = rows.map(([first]) => first)) {
  const classes = columns.map((column) => (column.startsWith("#") ? "n" : ""));
  const shown = (cell) => (typeof cell === "string" ? plain(cell) : cell);
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map((column, place) => (column === "" ? html`<td></td>`
      : html`<th scope="col" class=${classes[place]}>${column.replace("#", "")}</th>`))}</tr></thead>
    <tbody>${repeat(rows, (_, place) => keys[place], ([first, ...rest]) => html`<tr><th scope="row">${shown(first)}</th>${rest.map(
      (cell, place) => html`<td class=${classes[place + 1]}>${shown(cell)}</td>`)}</tr>`)}</tbody></table></div>`;
}
