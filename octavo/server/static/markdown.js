// Markdown as elements. Tags are shown as text, images as links, and links lead to the web or to
// mail only. The time is linear in the text's length.
import {el, say, scroll} from "./api.js";
import {formula} from "./formula.js";

const MAX_DEPTH = 12, MAX_LINK = 2000, MAX_FORMULA_LINES = 60;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])(?: +|$)/;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)/;
const RULE = /^ {0,3}([-*_]) *(?:\1 *){2,}$/;
const HEADING = /^ {0,3}(#{1,6})(?: |$)/;
const QUOTE = /^ {0,3}>/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const SPECIAL = /[\\`*_~[!$\n]|https?:\/\//g;
const WORD = /[\p{L}\p{N}]/u;
/** Show a text in an element. Unchanged blocks stay. */
export function render(element, text) {
  const blocks = split(text.split(/\r\n|\n|\r/), 0), shown = [...element.children];
  blocks.forEach(([source, make], i) => {
    if (shown[i]?.source === source) return;
    const node = Object.assign(make(), {source});
    if (shown[i]) shown[i].replaceWith(node); else element.append(node);
  });
  for (const old of shown.slice(blocks.length)) old.remove();
}
/** Return the blocks of lines: pairs of source and function that makes the element. */
function split(lines, depth) {
  const blocks = [];
  for (let i = 0, end; i < lines.length; i = end) {
    end = i + 1;
    if (!lines[i].trim()) continue;
    const [after, make] = blockAt(lines, i, depth);
    blocks.push([lines.slice(i, end = after).join("\n"), make]);
  }
  return blocks;
}
const build = (lines, depth) => split(lines, depth).map(([, make]) => make());
/** Return the end of the block at a line, and the function that makes it. */
function blockAt(lines, i, depth) {
  const line = lines[i], paragraph = (...content) => el("p", content);
  const until = test => {
    let end = i + 1;
    while (end < lines.length && !test(lines[end])) end++;
    return end;
  };
  let match, end;
  if (depth >= MAX_DEPTH) return [lines.length, () => paragraph(lines.slice(i).join("\n"))];
  if ((match = FENCE.exec(line))) {
    const [, fence, language] = match;
    end = until(other => other.trim().startsWith(fence) && !other.trim().replaceAll(fence[0], ""));
    return [Math.min(end + 1, lines.length), () => codeBlock(lines.slice(i + 1, end).join("\n"), language)];
  }
  if ((match = FORMULA.exec(line)) && (end = formulaEnd(lines, i, match[1] === "$$" ? "$$" : "\\]"))) {
    const source = lines.slice(i, end).join("\n").trim().slice(2, -2);
    return [end, () => el("p.formula", formula(source, true))];
  }
  if ((match = HEADING.exec(line))) {
    return [i + 1, () => el(`h${Math.min(match[1].length + 1, 6)}`, inline(line.trim().replace(/^#+/, "").trim(), depth))];
  }
  if (RULE.test(line)) return [i + 1, () => el("hr")];
  if (line.trimStart()[0] === ">") {
    end = until(other => other.trimStart()[0] !== ">");
    const inner = lines.slice(i, end).map(other => other.trimStart().slice(1).replace(/^ /, ""));
    return [end, () => el("blockquote", build(inner, depth + 1))];
  }
  if (ITEM.test(line)) return [end = listEnd(lines, i), () => list(lines.slice(i, end), depth)];
  if (line.includes("|") && isDelimiter(lines[i + 1])) {
    end = until(other => !other.includes("|"));
    return [end, () => table(lines.slice(i, end), depth)];
  }
  const ends = [FENCE, HEADING, RULE, FORMULA, QUOTE, /^ {0,3}([-*+]|1[.)]) /, /^\s*$/];
  end = until(other => ends.some(start => start.test(other)));
  return [end, () => paragraph(inline(lines.slice(i, end).map(other => other.trimStart()).join("\n"), depth))];
}
function codeBlock(code, language) {
  const button = el("button.quiet", {onclick: () => copy(code)}, "Copy");
  return el("div.code", el("div.row", el("span.dim", language || "code"), el("span.space"), button),
    el("pre", {tabindex: 0, role: "group", "aria-label": `${language} code`.trim()}, el("code", code)));
}
/** Copy a text, also where the page has no secure context. */
export async function copy(text) {
  try { await navigator.clipboard.writeText(text); } catch {
    const area = el("textarea", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("Copied.");
}
/** Return the line after a displayed formula; undefined if it is none. */
function formulaEnd(lines, start, closing) {
  for (let i = start; i < Math.min(lines.length, start + MAX_FORMULA_LINES); i++) {
    const text = lines[i].trim().slice(i === start ? 2 : 0), at = text.indexOf(closing);
    if (at >= 0) return at === text.length - 2 ? i + 1 : undefined;
  }
}
function listEnd(lines, start) {
  const [, {length: outer}, mark] = ITEM.exec(lines[start]);
  let end = start + 1;
  for (let i = end; i < lines.length; i++) {
    const line = lines[i], match = ITEM.exec(line), indent = line.length - line.trimStart().length;
    if (!line.trim()) continue;
    const goesOn = match ? match[1].length <= outer + 1 && /\d/.test(match[2]) === /\d/.test(mark) && !RULE.test(line)
      : i === end && ![HEADING, FENCE, FORMULA, QUOTE].some(other => other.test(line));
    if (!goesOn && indent < outer + 2) break;
    end = i + 1;
  }
  return end;
}
function list(lines, depth) {
  const [, {length: outer}, mark] = ITEM.exec(lines[0]), items = [], start = parseInt(mark, 10);
  for (const line of lines) {
    const match = ITEM.exec(line), indent = line.length - line.trimStart().length;
    if (match && match[1].length <= outer + 1) items.push([line.slice(match[0].length)]);
    else items.at(-1).push(line.slice(Math.min(outer + mark.length + 1, indent)));
  }
  return el(start >= 0 ? "ol" : "ul", {start: start >= 0 && start !== 1 ? start : null}, items.map(item => {
    const [first, ...others] = build(item, depth + 1);
    const isTight = first?.localName === "p" && !others.some(block => block.localName === "p");
    return el("li", isTight ? [...first.childNodes] : first, others);
  }));
}
function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}
const isDelimiter = line => /^[\s|:-]*-[\s|:-]*$/.test(line ?? "") && cells(line).every(cell => /^:?-+:?$/.test(cell));
function table([head, delimiter, ...body], depth) {
  const sides = cells(delimiter).map(cell => (cell.endsWith(":") ? (cell[0] === ":" ? "middle" : "number") : null));
  const row = (texts, name) => el("tr", sides.map((side, i) => el(name, {class: side}, inline(texts[i] ?? "", depth))));
  return scroll("Table", el("table", el("thead", row(cells(head), "th")), el("tbody", body.map(line => row(cells(line), "td")))));
}
function link(address, children) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return el("span", children);
  return el("a", {href: url.href, rel: "noopener noreferrer", target: "_blank"}, children);
}
function inline(text, depth) {
  const found = [], absent = new Set(), special = new RegExp(SPECIAL);
  let plain = "", i = 0;
  // A search that fails is not repeated, so that the time stays linear.
  const find = (end, from) => {
    const at = absent.has(end) ? -1 : text.indexOf(end, from);
    if (at < 0) absent.add(end);
    return at;
  };
  for (let next; (special.lastIndex = i, next = special.exec(text));) {
    plain += text.slice(i, next.index);
    i = next.index;
    const [part, end] = spanAt(text, i, find, depth) ?? [text[i], i + 1];
    if (typeof part === "string") plain += part;
    else { found.push(part.localName === "br" ? plain.trimEnd() : plain, part); plain = ""; }
    i = end;
  }
  found.push(plain + text.slice(i));
  return found.filter(part => part !== "");
}
/** Return the text or element at a mark, and its end; undefined: plain text. */
function spanAt(text, i, find, depth) {
  const mark = text[i], after = text[i + 1] ?? "", before = text[i - 1] ?? "";
  const inner = words => (depth < MAX_DEPTH ? inline(words, depth + 1) : [words]);
  let end, run = mark;
  if (mark === "\n") return text.slice(i - 2, i) === "  " ? [el("br"), i + 1] : undefined;
  if (mark === "\\") {
    end = {"(": "\\)", "[": "\\]"}[after] ? find({"(": "\\)", "[": "\\]"}[after], i + 2) : -1;
    if (end > 0) return [formula(text.slice(i + 2, end), after === "["), end + 2];
    return /[!-/:-@[-`{-~]/.test(after) ? [after, i + 2] : undefined;
  }
  if (mark === "`") {
    [run] = /^`+/.exec(text.slice(i, i + 9));
    end = find(run, i + run.length);
    return end > 0 ? [el("code", text.slice(i + run.length, end).trim()), end + run.length] : [run, i + run.length];
  }
  if (mark === "*" || mark === "_" || (mark === "~" && after === "~")) {
    if (after === mark) run += mark;
    const begin = i + run.length, plain = [run, begin];
    if (!(text[begin] ?? "").trim() || (mark === "_" && WORD.test(before))) return plain;
    end = find(run, begin + 1);
    // The end follows no space; two marks are no end of one.
    while (end > 0 && (!text[end - 1].trim() || (run === mark && text[end + 1] === mark))) {
      end = find(run, end + (text[end + 1] === mark ? 2 : 1));
    }
    if (end > 0 && run !== mark && text[end + 2] === mark) end++;
    if (end < 0 || (mark === "_" && WORD.test(text[end + run.length] ?? ""))) return plain;
    return [el(mark === "~" ? "del" : run === mark ? "em" : "strong", {}, inner(text.slice(begin, end))), end + run.length];
  }
  if (mark === "$") {
    if (after === "$") run = "$$";
    const begin = i + run.length;
    end = (text[begin] ?? "").trim() ? find(run, begin) : -1;
    // Two prices are no formula.
    const isFormula = end > 0 && text[end - 1].trim() && !/\d/.test(text[end + run.length] ?? "");
    return isFormula ? [formula(text.slice(begin, end), run === "$$"), end + run.length] : [run, begin];
  }
  if (mark === "h") {
    const match = WORD.test(before) ? null : /^https?:\/\/[^\s<>"'`\]]+/.exec(text.slice(i, i + MAX_LINK));
    if (!match) return undefined;
    // Signs at the end belong to the sentence; so does a bracket that the address does not open.
    const end = match[0].includes("(") ? /^.*[^.,;:!?*_]/ : /^.*[^.,;:!?*_)]/, [address] = end.exec(match[0]);
    return [link(address, address), i + address.length];
  }
  // A picture is a link: the page loads nothing from elsewhere.
  if (mark === "!" && after !== "[") return undefined;
  const from = i + (mark === "!" ? 2 : 1), close = find("](", from);
  end = close < 0 ? -1 : find(")", close + 2);
  if (end < 0 || end - from > MAX_LINK) return undefined;
  if (text.slice(close, end).includes("(", 2) && text[end + 1] === ")") end++;
  const [address] = text.slice(close + 2, end).trim().split(/\s/), words = text.slice(from, close);
  return [link(address, mark === "!" ? words || address : inner(words)), end + 1];
}
