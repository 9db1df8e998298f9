// Formulas of TeX's common subset, as MathML.

import {el} from "./api.js";

const MAX_LENGTH = 4000, MAX_DEPTH = 24;

const table = text => Object.fromEntries(text.trim().split(/\s+/).map(pair => pair.split("=", 2)));
const LETTERS = table(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ
  vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ pi=π rho=ρ sigma=σ tau=τ upsilon=υ phi=ϕ
  varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ
  Psi=Ψ Omega=Ω infty=∞ ell=ℓ hbar=ℏ partial=∂ nabla=∇ emptyset=∅ Re=ℜ Im=ℑ aleph=ℵ angle=∠
  dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱`);
const OPERATORS = table(`cdot=⋅ times=× div=÷ pm=± mp=∓ le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ ll=≪ gg=≫
  approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃
  supseteq=⊇ cup=∪ cap=∩ setminus=∖ forall=∀ exists=∃ neg=¬ lnot=¬ land=∧ wedge=∧ lor=∨ vee=∨
  oplus=⊕ otimes=⊗ circ=∘ bullet=∙ ast=∗ star=⋆ to=→ rightarrow=→ leftarrow=← leftrightarrow=↔
  Rightarrow=⇒ implies=⇒ Leftarrow=⇐ Leftrightarrow=⇔ iff=⇔ mapsto=↦ uparrow=↑ downarrow=↓ mid=∣
  parallel=∥ perp=⊥ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lbrace={ rbrace=} vert=| Vert=‖
  therefore=∴ because=∵ prime=′ {={ }=} %=% $=$ #=# &=& _=_ |=‖`);
const LARGE = table("sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ oint=∮ bigcup=⋃ bigcap=⋂ bigoplus=⨁");
const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp
  det dim ker deg gcd arg Pr`.split(/\s+/));
const LIMITS = new Set("lim max min sup inf argmax argmin limsup liminf".split(" "));
const ACCENTS = table("hat=^ widehat=^ bar=¯ overline=¯ tilde=~ widetilde=~ vec=→ dot=˙ ddot=¨");
const SPACES = {",": ".17em", ":": ".22em", ";": ".28em", "!": "0em", " ": ".3em", quad: "1em", qquad: "2em"};
const BOARD = table("R=ℝ N=ℕ Z=ℤ Q=ℚ C=ℂ E=𝔼 P=ℙ F=𝔽 1=𝟙");
const FENCES = {matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], cases: ["{", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], array: ["", ""]};

const m = (name, ...children) => el(`math:${name}`, {}, ...children);
const sign = (text, stretchy) => el("math:mo", {stretchy: stretchy ? "true" : "false"}, text);

/** Return a formula as MathML; as source text if a part of it is unknown. */
export function formula(source, display) {
  try {
    if (source.length > MAX_LENGTH) throw new Error("too long");
    const parser = new Parser(source, display);
    const row = parser.row(() => false);
    if (parser.token !== undefined) throw new Error("a bracket too many");
    return el("math:math", {display: display ? "block" : "inline"}, row);
  } catch {
    return el("code", {}, source);
  }
}

class Parser {
  constructor(source, display) {
    this.tokens = source.match(/\\[a-zA-Z]+\*?|\\.|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
    this.display = display;
    this.skip();
  }

  get token() { return this.tokens[this.at]; }

  skip() { while (/^\s/.test(this.token ?? "")) this.at++; }

  /** Return the token, and go to the next one that is not a space. */
  next() {
    const token = this.token;
    if (token === undefined) throw new Error("the formula ends early");
    this.at++;
    this.skip();
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new Error(`${token} is missing`);
  }

  /** Return a row of atoms with their scripts, up to a token that ends it. */
  row(ends) {
    if (++this.depth > MAX_DEPTH) throw new Error("too deep");
    const parts = [];
    while (this.token !== undefined && this.token !== "}" && !ends(this.token)) parts.push(this.scripts(this.atom()));
    this.depth--;
    return m("mrow", ...parts);
  }

  scripts(base) {
    let below = null, above = null;
    for (;;) {
      if (this.token === "_" && !below) { this.next(); below = this.argument(); }
      else if (this.token === "^" && !above) { this.next(); above = this.argument(); }
      else if (this.token === "'" && !above) {
        let primes = "";
        while (this.token === "'") { this.next(); primes += "′"; }
        above = m("mo", primes);
      } else break;
    }
    const [sub, sup, both] = base.limits && this.display ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (below && above) return m(both, base, below, above);
    return below ? m(sub, base, below) : above ? m(sup, base, above) : base;
  }

  argument() {
    if (/^\d./.test(this.token ?? "")) this.tokens.splice(this.at, 1, ...this.token);  // as in \frac12
    if (this.token !== "{") return this.atom();
    this.next();
    const row = this.row(() => false);
    this.expect("}");
    return row;
  }

  /** Return the text of a group without formulas. */
  text() {
    if (this.token !== "{") throw new Error("{ is missing");
    let text = "";
    for (this.at++; this.token !== "}"; this.at++) {
      if (this.token === undefined || this.token === "{") throw new Error("} is missing");
      text += this.token.replace(/^\\/, "");
    }
    this.next();
    return text;
  }

  atom() {
    const token = this.next();
    if (token === "{") {
      this.at--;
      return this.argument();
    }
    if (/^\d/.test(token)) return m("mn", token);
    if (/^\p{L}$/u.test(token)) return m("mi", token);
    if (token === "~") return el("math:mspace", {width: ".3em"});
    if (token[0] === "\\") return this.command(token.slice(1));
    if ("^_&".includes(token)) throw new Error(`${token} here`);
    return sign(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  command(name) {
    const own = table => (Object.hasOwn(table, name) ? table[name] : undefined);
    if (own(LETTERS)) return m("mi", LETTERS[name]);
    if (own(OPERATORS)) return sign(OPERATORS[name]);
    if (own(SPACES)) return el("math:mspace", {width: SPACES[name]});
    if (own(LARGE)) return Object.assign(m("mo", LARGE[name]), {limits: !name.includes("int")});
    if (FUNCTIONS.has(name)) return m("mi", name);
    if (LIMITS.has(name)) return Object.assign(m("mo", name), {limits: true});
    if (own(ACCENTS)) return el("math:mover", {accent: "true"}, this.argument(), sign(ACCENTS[name], /^(wide|over)/.test(name)));
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac": return m("mfrac", this.argument(), this.argument());
      case "binom": return m("mrow", sign("(", true), el("math:mfrac", {linethickness: "0"}, this.argument(), this.argument()), sign(")", true));
      case "sqrt": return this.root();
      case "text": case "mathrm": case "textbf": case "textit": case "mbox": case "mathtt": return m("mtext", this.text());
      case "operatorname": case "operatorname*": return m("mi", this.text());
      case "mathbf": case "boldsymbol": case "bm": return el("math:mrow", {class: "bold"}, this.argument());
      case "mathcal": case "mathit": case "displaystyle": case "textstyle": return /style$/.test(name) ? m("mrow") : this.argument();
      case "mathbb": {
        const text = this.text();
        return m("mi", Object.hasOwn(BOARD, text) ? BOARD[text] : text);
      }
      case "underline": return m("munder", this.argument(), sign("_", true));
      case "underbrace": return Object.assign(m("munder", this.argument(), sign("⏟", true)), {limits: true});
      case "boxed": return this.argument();
      case "left": return this.fenced();
      case "big": case "Big": case "bigl": case "bigr": case "Bigl": case "Bigr": return this.fence();
      case "not": return m("mrow", sign("̸"), this.argument());
      case "begin": return this.matrix();
      default: throw new Error(`\\${name} is unknown`);
    }
  }

  root() {
    if (this.token !== "[") return m("msqrt", this.argument());
    this.next();
    const index = this.row(token => token === "]");
    this.expect("]");
    return m("mroot", this.argument(), index);
  }

  /** Return a bracket that is as high as its content. */
  fence() {
    const token = this.next(), name = token.slice(1);
    if (token === ".") return sign("");
    if (token[0] === "\\" && !Object.hasOwn(OPERATORS, name)) throw new Error(`${token} is no bracket`);
    return sign(token[0] === "\\" ? OPERATORS[name] : token, true);
  }

  fenced() {
    const left = this.fence();
    const row = this.row(token => token === "\\right");
    this.expect("\\right");
    return m("mrow", left, row, this.fence());
  }

  matrix() {
    const name = this.text();
    if (!Object.hasOwn(FENCES, name)) throw new Error(`${name} is unknown`);
    if (name === "array") this.text();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(m("mtd", this.row(token => ["&", "\\\\", "\\end"].includes(token))));
      const token = this.next();
      if (token === "\\\\") rows.push([]);
      else if (token === "\\end") break;
      else if (token !== "&") throw new Error("} here");
    }
    if (this.text() !== name) throw new Error("another \\end");
    if (rows.at(-1).length === 1 && !rows.at(-1)[0].textContent) rows.pop();
    const [left, right] = FENCES[name];
    const body = el("math:mtable", {class: /^(cases|align)/.test(name) ? "left" : null}, ...rows.map(row => m("mtr", ...row)));
    return m("mrow", left && sign(left, true), body, right && sign(right, true));
  }
}
