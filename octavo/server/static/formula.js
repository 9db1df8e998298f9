// Formulas of TeX's common subset, as MathML; others as source text.
import {byId, el, parts} from "./api.js";

const MAX_LENGTH = 4000, MAX_DEPTH = 24;
// index.html has them, such as alpha=α.
const table = ({textContent}) => new Map(textContent.trim().split(/\s+/).map(word => /^(.[^=]*)=(.*)/.exec(word).slice(1)));
const [letters, operators, large, accents, spaces, board] = Object.values(parts(byId("symbols").content)).map(table);

const m = (name, ...children) => el(`math:${name}`, children);
const sign = (text, stretchy = false) => el("math:mo", {stretchy: String(stretchy)}, text);
const fail = () => { throw new Error("not of the subset"); };
export function formula(source, display) {
  try { return parse(source, display); } catch { return el("code", source); }
}
function parse(source, display) {
  if (source.length > MAX_LENGTH) fail();
  const tokens = source.trim().match(/\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
  let at = 0, depth = 0;
  const next = () => {
    const token = tokens[at++] ?? fail();
    while (/^\s/.test(tokens[at] ?? "")) at++;
    return token;
  };
  const expect = token => next() === token || fail();
  /** Return atoms with scripts up to a token. */
  function row(...ends) {
    if (++depth > MAX_DEPTH) fail();
    const parts = [];
    while (at < tokens.length && tokens[at] !== "}" && !ends.includes(tokens[at])) parts.push(scripts(atom()));
    depth--;
    return m("mrow", parts);
  }
  function scripts(base) {
    let below, above;
    for (;;) {
      if (tokens[at] === "_" && !below) { next(); below = argument(); }
      else if (tokens[at] === "^" && !above) { next(); above = argument(); }
      else if (tokens[at] === "'" && !above) { next(); above = m("mo", "′"); }
      else break;
    }
    const [sub, sup, both] = base.limits && display ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (below && above) return m(both, base, below, above);
    return below ? m(sub, base, below) : above ? m(sup, base, above) : base;
  }
  function argument() {
    if (/^\d./.test(tokens[at] ?? "")) tokens.splice(at, 1, ...tokens[at]);  // as in \frac12
    return tokens[at] === "{" ? group("{", "}") : atom();
  }
  function group(open, close) {
    expect(open);
    const inner = row(close);
    expect(close);
    return inner;
  }
  function text() {
    let words = "";
    if (tokens[at] !== "{") fail();
    for (at++; tokens[at] !== "}"; at++) words += tokens[at] === "{" ? fail() : tokens[at] ?? fail();
    next();
    return words.replaceAll("\\", "");
  }
  function atom() {
    if (tokens[at] === "{") return argument();
    const token = next();
    if (token[0] === "\\") return command(token.slice(1));
    if (/^\d/.test(token)) return m("mn", token);
    if (/^\p{L}$/u.test(token)) return m("mi", token);
    return /[\^_&]/.test(token) ? fail() : sign({"-": "−", "*": "∗", "~": " "}[token] ?? token);
  }
  function command(name) {
    if (letters.has(name)) return m("mi", letters.get(name));
    if (operators.has(name)) return sign(operators.get(name));
    if (spaces.has(name) || name === " ") return el("math:mspace", {width: spaces.get(name) ?? ".3em"});
    if (large.has(name)) return Object.assign(m("mo", large.get(name)), {limits: true});
    if (accents.has(name)) return el("math:mover", {accent: "true"}, argument(), sign(accents.get(name), name === "overline"));
    if (/^(text|mathrm|textbf|operatorname)$/.test(name)) return m("mtext", text());
    if (/^(mathcal|mathbf|boxed)$/.test(name)) return argument();
    if (/^[dt]?frac$/.test(name)) return m("mfrac", argument(), argument());
    const index = name === "sqrt" && tokens[at] === "[" ? group("[", "]") : null;
    if (name === "sqrt") return m(index ? "mroot" : "msqrt", argument(), index);
    if (name === "mathbb") return m("mi", text().replace(/./, letter => board.get(letter) ?? letter));
    if (name === "left") return m("mrow", fence(), row("\\right"), expect("\\right") && fence());
    return fail();
  }
  function fence() {
    const token = next();
    return sign(token === "." ? "" : token[0] === "\\" ? operators.get(token.slice(1)) ?? fail() : token, true);
  }
  const whole = row();
  return at < tokens.length ? fail() : el("math:math", {display: display ? "block" : "inline"}, whole);
}
