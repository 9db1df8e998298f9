// Formulas of TeX's common subset, as MathML.

import {el} from "./api.js";

const MAX_LENGTH = 4000, MAX_DEPTH = 24;
const FUNCTIONS = /^(sin|cos|tan|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|det|gcd|arg|Pr)$/;
const LIMITS = /^(lim|max|min|sup|inf)$/;
const SPACES = new Map([[",", ".17em"], [";", ".28em"], [" ", ".3em"], ["!", "0em"], ["quad", "1em"], ["qquad", "2em"]]);

const table = text => new Map(text.split(/\s+/).map(word => [word.slice(0, word.indexOf("=", 1)), word.slice(word.indexOf("=", 1) + 1)]));
const LETTERS = table("infty=∞ ell=ℓ partial=∂ nabla=∇ emptyset=∅ varepsilon=ε phi=ϕ dots=… ldots=… cdots=⋯");
`alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau upsilon varphi
  chi psi omega`.split(/\s+/).forEach((name, i) => {
  const capital = name.replace("var", "").replace(/^./, first => first.toUpperCase());
  LETTERS.set(name, String.fromCharCode(0x3b1 + i)).set(capital, String.fromCharCode(0x391 + i));
});
const OPERATORS = table(`cdot=⋅ times=× div=÷ pm=± le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ approx=≈ equiv=≡ sim=∼ propto=∝ in=∈
  notin=∉ subset=⊂ subseteq=⊆ cup=∪ cap=∩ setminus=∖ forall=∀ exists=∃ neg=¬ land=∧ lor=∨ oplus=⊕ otimes=⊗ circ=∘ to=→
  rightarrow=→ Rightarrow=⇒ implies=⇒ iff=⇔ mid=∣ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ {={ }=} %=% $=$ #=#
  &=& _=_ |=‖ int=∫`);
const LARGE = table("sum=∑ prod=∏");
const ACCENTS = table("hat=^ bar=¯ overline=¯ tilde=~ vec=→ dot=˙");
const BOARD = table("R=ℝ N=ℕ Z=ℤ Q=ℚ C=ℂ E=𝔼 P=ℙ");

const m = (name, ...children) => el(`math:${name}`, {}, children);
const sign = (text, stretchy = false) => el("math:mo", {stretchy: String(stretchy)}, text);
const fail = what => { throw new Error(what); };
/** Return a formula as MathML; as source text if a part of it is unknown. */
export function formula(source, display) {
  try { return parse(source, display); } catch { return el("code", {}, source); }
}

function parse(source, display) {
  if (source.length > MAX_LENGTH) fail("too long");
  const tokens = source.trim().match(/\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
  let at = 0, depth = 0;
  const next = () => {
    const token = tokens[at++] ?? fail("early end");
    while (/^\s/.test(tokens[at] ?? "")) at++;
    return token;
  };
  const expect = token => next() === token || fail(`no ${token}`);

  /** Return a row of atoms with their scripts, up to a token that ends it. */
  function row(...ends) {
    if (++depth > MAX_DEPTH) fail("too deep");
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

  /** Return the text of a group without formulas. */
  function text() {
    let words = "";
    if (tokens[at] !== "{") fail("no {");
    for (at++; tokens[at] !== "}"; at++) words += tokens[at] === "{" ? fail("{ here") : tokens[at] ?? fail("no }");
    next();
    return words.replaceAll("\\", "");
  }

  function atom() {
    if (tokens[at] === "{") return argument();
    const token = next();
    if (token[0] === "\\") return command(token.slice(1));
    if (/^\d/.test(token)) return m("mn", token);
    if (/^\p{L}$/u.test(token)) return m("mi", token);
    return /[\^_&]/.test(token) ? fail(`${token} here`) : sign({"-": "−", "*": "∗", "~": " "}[token] ?? token);
  }

  function command(name) {
    if (LETTERS.has(name)) return m("mi", LETTERS.get(name));
    if (OPERATORS.has(name)) return sign(OPERATORS.get(name));
    if (SPACES.has(name)) return el("math:mspace", {width: SPACES.get(name)});
    if (LARGE.has(name) || LIMITS.test(name)) return Object.assign(m("mo", LARGE.get(name) ?? name), {limits: true});
    if (FUNCTIONS.test(name)) return m("mi", name);
    if (ACCENTS.has(name)) return el("math:mover", {accent: "true"}, argument(), sign(ACCENTS.get(name), name === "overline"));
    if (/^(text|mathrm|textbf|operatorname)$/.test(name)) return m("mtext", text());
    if (/^(mathcal|mathbf|boxed)$/.test(name)) return argument();
    if (/^[dt]?frac$/.test(name)) return m("mfrac", argument(), argument());
    switch (name) {
      case "sqrt": {
        const index = tokens[at] === "[" ? group("[", "]") : null;
        return m(index ? "mroot" : "msqrt", argument(), index);
      }
      case "mathbb": { const letter = text(); return m("mi", BOARD.get(letter) ?? letter); }
      case "left": return m("mrow", fence(), row("\\right"), expect("\\right") && fence());
      default: return fail(`\\${name} is unknown`);
    }
  }

  /** Return a bracket that is as high as its content. */
  function fence() {
    const token = next();
    return sign(token === "." ? "" : token[0] === "\\" ? OPERATORS.get(token.slice(1)) ?? fail("no bracket") : token, true);
  }
  const whole = row();
  return at < tokens.length ? fail("a bracket too many") : el("math:math", {display: display ? "block" : "inline"}, whole);
}
