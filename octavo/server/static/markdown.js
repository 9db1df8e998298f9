// Markdown, rendered as elements. The text is never parsed as HTML: tags are shown as text, images
// as links, and links lead to the web or to mail only.

import {el} from "./api.js";
import {formula} from "./formula.js";

const MAX_DEPTH = 12;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])(?: +|$)/;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ ]*([\w+#.-]*)/;
const RULE = /^ {0,3}([-*_])[ ]*(?:\1[ ]*){2,}$/;

/** Show a Markdown text in an element. Blocks that have not changed since the last call stay. */
export function render(element, text) {
  const blocks = split(text.split(/\r\n|\n|\r/), 0);
  blocks.forEach(([source, make], i) => {
    const old = element.children[i];
    if (old?.source === source) return;
    const node = make();
    node.source = source;
    if (old) old.replaceWith(node); else element.append(node);
  });
  while (element.children.length > blocks.length) element.lastElementChild.remove();
}

/** Return the blocks of lines: pairs of source and function that makes the element. */
function split(lines, depth) {
  const blocks = [];
  let i = 0;
  const add = (end, make) => {
    blocks.push([lines.slice(i, end).join("\n"), make]);
    i = end;
  };
  const until = test => {
    let end = i + 1;
    while (end < lines.length && !test(lines[end])) end++;
    return end;
  };
  while (i < lines.length) {
    const line = lines[i], begin = line.trimStart();
    let match;
    if (!begin) { i++; continue; }
    if (depth >= MAX_DEPTH) {
      const rest = lines.slice(i).join("\n");
      add(lines.length, () => el("p", {}, rest));
    } else if ((match = FENCE.exec(line))) {
      const [, fence, language] = match;
      const end = until(other => other.trim().startsWith(fence) && !other.trim().replaceAll(fence[0], ""));
      const code = lines.slice(i + 1, end).join("\n");
      add(Math.min(end + 1, lines.length), () => codeBlock(code, language));
    } else if ((match = /^(\$\$|\\\[)/.exec(begin)) && mathEnd(lines, i, match[1]) !== null) {
      const end = mathEnd(lines, i, match[1]);
      const source = lines.slice(i, end).join("\n").trim().slice(2, -2);
      add(end, () => el("p", {class: "formula"}, formula(source, true)));
    } else if ((match = /^ {0,3}(#{1,6})(?: |$)/.exec(line))) {
      const words = begin.slice(match[1].length).trim();
      add(i + 1, () => el(`h${Math.min(match[1].length + 2, 6)}`, {}, ...inline(words, depth)));
    } else if (RULE.test(line)) {
      add(i + 1, () => el("hr"));
    } else if (begin[0] === ">") {
      const end = until(other => !other.trimStart().startsWith(">"));
      const inner = lines.slice(i, end).map(other => other.trimStart().slice(1).replace(/^ /, ""));
      add(end, () => el("blockquote", {}, ...make(inner, depth + 1)));
    } else if (ITEM.test(line)) {
      const ordered = /\d/.test(begin[0]);
      const end = listEnd(lines, i, ordered);
      const inner = lines.slice(i, end);
      add(end, () => list(inner, ordered, depth));
    } else if (line.includes("|") && isDelimiter(lines[i + 1])) {
      const end = until(other => !other.includes("|"));
      const rows = [lines[i], ...lines.slice(i + 2, end)].map(cells);
      const sides = cells(lines[i + 1]).map(cell => (cell.endsWith(":") ? (cell[0] === ":" ? "middle" : "number") : null));
      add(end, () => table(rows, sides, depth));
    } else {
      const end = until(other => !other.trim() || FENCE.test(other) || /^ {0,3}(#{1,6} |>|\$\$)/.test(other)
        || other.trimStart().startsWith("\\[") || (ITEM.test(other) && !/^ *\d+/.test(other)) || RULE.test(other));
      const words = lines.slice(i, end).map(other => other.trimStart()).join("\n");
      add(end, () => el("p", {}, ...inline(words, depth)));
    }
  }
  return blocks;
}

const make = (lines, depth) => split(lines, depth).map(([, build]) => build());

function codeBlock(code, language) {
  const button = el("button", {class: "quiet", onclick: () => copy(code, button)}, "Copy");
  return el("div", {class: "code"},
    el("div", {class: "row"}, el("span", {class: "dim"}, language || "code"), el("span", {class: "space"}), button),
    el("pre", {tabindex: 0, role: "group", "aria-label": `${language || ""} code`.trim()}, el("code", {}, code)));
}

/** Copy a text, also where the page has no secure context, and say so on the button. */
export async function copy(text, button) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", {value: text});
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = name; }, 1500);
}

/** Return the line after a displayed formula; null if it is not closed or a paragraph goes on. */
function mathEnd(lines, start, opening) {
  const closing = opening === "$$" ? "$$" : "\\]";
  for (let i = start; i < lines.length && i < start + 60; i++) {
    const text = i === start ? lines[i].trim().slice(2) : lines[i].trim();
    const at = text.indexOf(closing);
    if (at >= 0) return at === text.length - 2 ? i + 1 : null;
  }
  return null;
}

/** Return the line after a list: it ends before a line that is neither an item nor indented. */
function listEnd(lines, start, ordered) {
  const outer = ITEM.exec(lines[start])[1].length;
  let end = start + 1;
  for (let i = start + 1; i < lines.length; i++) {
    const line = lines[i], match = ITEM.exec(line);
    if (!line.trim()) continue;
    const indent = line.length - line.trimStart().length;
    const same = match && indent <= outer + 1 && /\d/.test(match[2]) === ordered && !RULE.test(line);
    const lazy = i === end && !match && !/^ {0,3}(#|>|`{3}|~{3}|\$\$|\\\[)/.test(line) && lines[i - 1].trim();
    if (!same && indent < outer + 2 && !lazy) break;
    end = i + 1;
  }
  return end;
}

function list(lines, ordered, depth) {
  const outer = ITEM.exec(lines[0])[1].length, items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= outer + 1) items.push([line.slice(match[0].length)]);
    else items.at(-1).push(line.slice(Math.min(outer + (ordered ? 3 : 2), line.length - line.trimStart().length)));
  }
  const start = ordered ? parseInt(lines[0].trim(), 10) : 1;
  return el(ordered ? "ol" : "ul", ordered && start !== 1 ? {start} : {}, ...items.map(item => {
    const blocks = make(item, depth + 1);
    const tight = blocks.filter(block => block.localName === "p").length === 1 && blocks[0].localName === "p";
    return el("li", {}, ...(tight ? [...blocks[0].childNodes, ...blocks.slice(1)] : blocks));
  }));
}

function isDelimiter(line) {
  return line !== undefined && line.includes("-") && /^[\s|:-]+$/.test(line) && cells(line).every(cell => /^:?-+:?$/.test(cell));
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/([^\\]|^)\|$/, "$1");
  return row.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function table(rows, sides, depth) {
  const row = (cells, name) => el("tr", {}, ...sides.map((side, i) => el(name, {class: side}, ...inline(cells[i] ?? "", depth))));
  return el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "Table"}, el("table", {},
    el("thead", {}, row(rows[0], "th")), el("tbody", {}, ...rows.slice(1).map(cells => row(cells, "td")))));
}

/** Return a link, or its text alone if the address is not one of the web or of mail. */
function link(address, children) {
  let url = null;
  try { url = new URL(address); } catch { /* relative, or no address */ }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return el("span", {}, ...children);
  return el("a", {href: url.href, rel: "noopener noreferrer", target: "_blank"}, ...children);
}

const WORD = /[\p{L}\p{N}]/u;

/** Return the texts and elements of a line. A marker that is not closed is text. */
function inline(text, depth) {
  const found = [], absent = new Set();
  let plain = "", i = 0;
  // Each search for an end that fails is made once, so that the time stays linear.
  const find = (end, from) => {
    if (absent.has(end)) return -1;
    const at = text.indexOf(end, from);
    if (at < 0) absent.add(end);
    return at;
  };
  const add = (node, end) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(node);
    i = end;
  };
  const inner = words => (depth < MAX_DEPTH ? inline(words, depth + 1) : [words]);
  const special = /[\\`*_~[!<$\n]|https?:\/\//g;
  for (;;) {
    special.lastIndex = i;
    const next = special.exec(text);
    if (!next) break;
    plain += text.slice(i, next.index);
    i = next.index;
    const mark = text[i], after = text[i + 1] ?? "", before = text[i - 1] ?? "";
    let end, match;
    if (mark === "\n") {
      if (plain.endsWith("  ")) { plain = plain.trimEnd(); add(el("br"), i + 1); continue; }
    } else if (mark === "\\") {
      if ((after === "(" || after === "[") && (end = find(after === "(" ? "\\)" : "\\]", i + 2)) > 0) {
        add(formula(text.slice(i + 2, end), after === "["), end + 2);
        continue;
      }
      if (/[!-/:-@[-`{-~]/.test(after)) { plain += after; i += 2; continue; }
    } else if (mark === "`") {
      const run = /^`+/.exec(text.slice(i, i + 9))[0];
      if ((end = find(run, i + run.length)) > 0) {
        add(el("code", {}, text.slice(i + run.length, end).trim()), end + run.length);
        continue;
      }
      plain += run; i += run.length;
      continue;
    } else if (mark === "*" || mark === "_" || (mark === "~" && after === "~")) {
      const run = mark === "~" || after === mark ? mark + mark : mark;
      const open = text[i + run.length] ?? " ";
      if (open.trim() && !(mark === "_" && WORD.test(before))) {
        end = find(run, i + run.length + 1);
        while (end > 0 && (!text[end - 1].trim() || (run.length === 1 && text[end + 1] === mark && text[end - 1] !== mark))) {
          end = find(run, end + (text[end + 1] === mark ? 2 : 1));
        }
        if (end > 0 && run.length === 2 && text[end + 2] === mark) end++;
        if (end > 0 && !(mark === "_" && WORD.test(text[end + run.length] ?? ""))) {
          const name = mark === "~" ? "del" : run.length === 2 ? "strong" : "em";
          add(el(name, {}, ...inner(text.slice(i + run.length, end))), end + run.length);
          continue;
        }
      }
      plain += run; i += run.length;
      continue;
    } else if (mark === "$") {
      const run = after === "$" ? "$$" : "$", open = text[i + run.length] ?? " ";
      if (open.trim() && (end = find(run, i + run.length)) > 0) {
        const source = text.slice(i + run.length, end), follows = text[end + run.length] ?? "";
        // Two prices are no formula.
        if (source.trimEnd() === source && !/\d/.test(follows) && !source.includes("\n\n")) {
          add(formula(source, run === "$$"), end + run.length);
          continue;
        }
      }
    } else if (mark === "<") {
      if ((match = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/.exec(text.slice(i, i + 2010)))) {
        add(link(match[1], [match[1]]), i + match[0].length);
        continue;
      }
    } else if (mark === "h") {
      match = /^https?:\/\/[^\s<>"'`\]]{1,2000}/.exec(text.slice(i, i + 2010));
      if (match && !WORD.test(before)) {
        const address = match[0].replace(/[.,;:!?*_)]{1,9}$/, tail => (match[0].includes("(") && tail === ")" ? ")" : ""));
        add(link(address, [address]), i + address.length);
        continue;
      }
    } else if (mark === "[" || after === "[") {
      // A picture is a link: the page loads nothing from elsewhere.
      const from = i + (mark === "!" ? 2 : 1);
      match = linkAt(text, from, find);
      if (match) {
        const label = text.slice(from, match.close) || match.address;
        add(link(match.address, mark === "!" ? [label] : inner(label)), match.end);
        continue;
      }
    }
    plain += mark;
    i++;
  }
  plain += text.slice(i);
  if (plain) found.push(plain);
  return found;
}

/** Return where a link's text and the link end, and its address; null if there is none. */
function linkAt(text, from, find) {
  const close = find("](", from), end = close < 0 ? -1 : find(")", close + 2);
  if (end < 0 || end - from > 4000) return null;
  const nested = text.slice(close + 2, end).includes("(") && text[end + 1] === ")" ? end + 1 : end;
  const address = text.slice(close + 2, nested).trim().split(/\s/)[0].replace(/^<|>$/g, "");
  return {close, address, end: nested + 1};
}
