// The slots of the wall: one canvas draws them over the nodes. As elements, five thousand slots cost
// a browser a tenth of a second at each update.

import { cellsOf, OUT, sampleOf } from "./cells.js";
import { colour, theme } from "./theme.js";

const HEIGHT = 12;
const WIDTH = 6;
const GAP = 2;
/** CSS pixels from one slot to the next at least; of more slots than fit a sample is drawn. */
const LEAST_PITCH = 3;
/** Pixels of a canvas; some browsers draw nothing on one of more than 16 million. */
const MOST_PIXELS = 12_000_000;
/** Pixels of a canvas's side; Firefox draws nothing on a longer one. */
const MOST_SIDE = 32_000;
/** How much of a busy slot is filled, by its figure; 0 is a slot of which that is not known. */
const FILLS = [0.3, 0.12, 0.24, 0.37, 0.5, 0.62, 0.75, 0.87, 1];
const COLOURS = { r: "--reading", w: "--writing", h: "--held", o: "--others", f: "--edge" };

let list = null;
let canvas = null;
/** Where the nodes are, in CSS pixels; null until they have been laid out. */
let layout = null;
let shown = [];
/** What stands on the canvas for each place. */
let drawn = [];
const pictures = new Map();

const observer = new ResizeObserver(() => {
  layout = list === null || !list.isConnected ? null : measured();
  drawChanged();
});

/** Draw the slots of these nodes, which stand in the list `.dots` in this order. */
export function drawWall(nodes) {
  const found = document.querySelector(".dots");
  if (found !== list) {
    observer.disconnect();
    list = found;
    canvas = list?.parentElement.querySelector("canvas") ?? null;
    layout = null;
    drawn = [];
    pictures.clear();
    if (list !== null) observer.observe(list);
  }
  shown = list === null ? [] : nodes;
  drawChanged();
}

function measured() {
  const [first, second] = list.children;
  const mark = first?.querySelector(".mark");
  if (!mark) return null;
  const corner = list.getBoundingClientRect();
  const node = first.getBoundingClientRect();
  const style = getComputedStyle(list);
  const columns = style.gridTemplateColumns.split(" ").length;
  const below = list.children[columns]?.getBoundingClientRect();
  const left = mark.getBoundingClientRect().right - corner.left + 3;
  const wanted = window.devicePixelRatio;
  const scale = Math.min(wanted, Math.sqrt(MOST_PIXELS / Math.max(1, corner.width * corner.height)),
    MOST_SIDE / Math.max(1, corner.width, corner.height));
  canvas.width = Math.round(corner.width * scale);
  canvas.height = Math.round(corner.height * scale);
  drawn = [];
  pictures.clear();
  return {
    columns, wanted, scale, theme: theme(), left,
    room: node.right - corner.left - 4 - left,
    top: (node.height - HEIGHT) / 2,
    // A second node may come beside the first without any change of the list's size.
    across: second ? second.getBoundingClientRect().left - node.left : node.width + parseFloat(style.columnGap),
    down: below ? below.top - node.top : 0,
  };
}

function drawChanged() {
  if (layout === null) return;
  if (layout.wanted !== window.devicePixelRatio || layout.theme !== theme()) layout = measured();
  if (layout === null) return;
  const context = canvas.getContext("2d");
  context.setTransform(layout.scale, 0, 0, layout.scale, 0, 0);
  for (let place = 0; place < Math.max(shown.length, drawn.length); place += 1) {
    const node = shown[place];
    const wanted = node === undefined ? "" : `${OUT.has(node.state) ? "-" : "+"}${node.cells}`;
    if (wanted === drawn[place]) continue;
    drawn[place] = wanted;
    drawNode(context, place, wanted);
  }
  drawn.length = shown.length;
}

function drawNode(context, place, wanted) {
  const { columns, left, room, top, across, down } = layout;
  const x = left + (place % columns) * across;
  const y = top + Math.floor(place / columns) * down;
  context.clearRect(x - 1, y - 1, room + 2, HEIGHT + 2);
  const cells = cellsOf(wanted.slice(1));
  const pitch = Math.max(LEAST_PITCH, Math.min(WIDTH + GAP, room / cells.length));
  const width = pitch - (pitch < WIDTH ? 1 : GAP);
  const fits = Math.max(0, Math.floor((room + GAP) / pitch));
  for (const [number, [letter, fill]] of sampleOf(cells, fits).entries()) {
    context.drawImage(picture(letter, Number(fill), letter === "f" && wanted[0] === "-"), x + number * pitch, y, width, HEIGHT);
  }
}

/** A slot as a small canvas, as the style sheet draws it in the larger views. */
function picture(letter, fill, isOut) {
  const name = `${letter}${fill}${isOut}`;
  let made = pictures.get(name);
  if (made === undefined) pictures.set(name, made = drawPicture(letter, fill, isOut));
  return made;
}

function drawPicture(letter, fill, out) {
  const made = document.createElement("canvas");
  made.width = Math.max(1, Math.round(WIDTH * layout.scale));
  made.height = Math.max(1, Math.round(HEIGHT * layout.scale));
  const context = made.getContext("2d");
  context.scale(made.width / WIDTH, made.height / HEIGHT);
  const ink = colour(COLOURS[letter] ?? COLOURS.f, true);
  context.strokeStyle = ink;
  context.fillStyle = ink;
  context.globalAlpha = out ? 0.55 : 1;
  if (out) context.setLineDash([1, 1]);
  else if (fill === 0) context.setLineDash([2, 1]);
  context.strokeRect(0.5, 0.5, WIDTH - 1, HEIGHT - 1);
  const full = (HEIGHT - 2) * FILLS[fill];
  context.beginPath();
  context.rect(1, HEIGHT - 1 - full, WIDTH - 2, full);
  context.clip();
  context.setLineDash([]);
  if (letter === "w") context.fillRect(0, 0, WIDTH, HEIGHT);
  else if (letter === "h") for (let y = HEIGHT - 2; y > 0; y -= 2) context.fillRect(0, y, WIDTH, 1);
  else if (letter === "o") for (let y = 2; y < HEIGHT; y += 3) context.fillRect(2, y, 2, 1.5);
  else if (letter === "r") {
    context.lineWidth = 1.6;
    for (let y = -WIDTH; y < HEIGHT + WIDTH; y += 3) {
      context.beginPath();
      context.moveTo(0, y + WIDTH);
      context.lineTo(WIDTH, y);
      context.stroke();
    }
  }
  return made;
}
