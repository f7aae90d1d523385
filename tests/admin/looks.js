// What a page looks like, for tests: each function returns what is wrong, in words.

window.looks = (() => {
  const words = (one) => `${one.tagName.toLowerCase()}${one.id ? `#${one.id}` : ""}.${[...one.classList].join(".")} ${
    JSON.stringify((one.textContent || one.placeholder || one.value || "").trim().slice(0, 60))}`;
  const isShown = (one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(".unseen, .skip, svg, option, datalist");
  const isOver = (inner, outer) => inner.right > outer.right + 1.5 || inner.left < outer.left - 1.5
    || inner.bottom > outer.bottom + 1.5 || inner.top < outer.top - 1.5;
  const cuts = (style) => ["hidden", "clip"].includes(style.overflowX) || ["hidden", "clip"].includes(style.overflowY);
  const scrolls = (style) => ["auto", "scroll"].includes(style.overflowX) || ["auto", "scroll"].includes(style.overflowY);
  const BOXES = "button, .chip, .button, td, th, dd, .panel, .figure, .node, .problem, .command, .group, .toast";

  /** Texts that are cut off, or stand out of their box; what has a title, which tiles get in time, can be read. */
  function cutOff() {
    const found = [];
    const range = document.createRange();
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const node = texts.currentNode;
      const parent = node.parentElement;
      if (node.data.trim() === "" || !isShown(parent) || parent.closest("[title], .tiles a")) continue;
      range.selectNodeContents(node);
      const box = range.getBoundingClientRect();
      for (let one = parent; one !== document.body; one = one.parentElement) {
        const style = getComputedStyle(one);
        if (scrolls(style)) break;
        if ((cuts(style) || one.matches(BOXES)) && isOver(box, one.getBoundingClientRect())) {
          found.push(`${words(parent)} in ${words(one).split(" ")[0]}`);
          break;
        }
      }
    }
    const pen = document.createElement("canvas").getContext("2d");
    for (const field of document.querySelectorAll("[placeholder]")) {
      const style = getComputedStyle(field);
      pen.font = style.font;
      const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      const lines = field.tagName === "TEXTAREA" ? 3 : 1;
      if (isShown(field) && pen.measureText(field.placeholder).width > lines * room + 1) found.push(`placeholder ${field.placeholder}`);
    }
    return found;
  }

  /** What is to be clicked and is smaller than 32 px; links within a sentence are as high as its lines. */
  function smallTargets() {
    const found = [];
    for (const one of document.querySelectorAll("a[href], button, input, select, textarea, summary")) {
      if (!isShown(one)) continue;
      const inSentence = one.tagName === "A" && one.closest("p, dd, li, h3")?.textContent.trim().length > one.textContent.trim().length + 12
        && getComputedStyle(one).display === "inline";
      const { width, height } = (one.type === "checkbox" ? one.closest("label") : one).getBoundingClientRect();
      if (!inSentence && (width < 31.5 || height < 31.5)) found.push(`${words(one)} ${Math.round(width)} x ${Math.round(height)}`);
    }
    return found;
  }

  /** What a name has brought in that is no text. */
  function foreign() {
    const found = [...document.querySelectorAll("body img, body iframe, #page script, body object")].map(words);
    if (/[\u202e\u0007]/.test(document.body.innerText)) found.push("a character that turns or rings");
    return found;
  }

  /** Charts that nothing feeds. */
  function unfed() {
    return [...document.querySelectorAll("figure[data-chart] .plot, svg.columns")].filter((one) => !/now \d|most \d/.test(one.getAttribute("aria-label")))
      .map((one) => one.getAttribute("aria-label") ?? "a chart without words");
  }

  async function violations() {
    const { violations: list } = await axe.run(document, { resultTypes: ["violations"] });
    return list.map((one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 160)).slice(0, 3).join(" | ")}`);
  }

  return async () => {
    const { scrollWidth } = document.documentElement;
    return {
      wide: scrollWidth > innerWidth ? [`${scrollWidth} of ${innerWidth}`] : [],
      cutOff: cutOff(), smallTargets: smallTargets(), foreign: foreign(), unfed: unfed(), violations: await violations(),
    };
  };
})();
