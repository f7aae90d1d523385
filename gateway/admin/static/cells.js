// The slots of a node as "w3r0ff" tells them: a letter for each, and how full a busy one is, 0 to 8.

const BUSY = "rwh";

/** The cells of "w3r0ff" as [letter, fill] pairs. */
export function cellsOf(cells) {
  const found = [];
  for (let place = 0; place < cells.length; place += 1) {
    const letter = cells[place];
    const busy = BUSY.includes(letter);
    found.push([letter, busy ? cells[place + 1] : "8"]);
    if (busy) place += 1;
  }
  return found;
}

/** So many of these cells at most, in which each kind has its share: the busy ones come first. */
export function sampleOf(cells, most) {
  if (cells.length <= most) return cells;
  return Array.from({ length: most }, (_, number) => cells[Math.floor((number * cells.length) / most)]);
}

/** States in which a free slot takes no work. */
export const OUT = new Set(["down", "ejected", "loading", "starting", "standby"]);
