"""Names and texts of clients and operators that must stay texts: in HTML, JSON and metrics."""

NAMES = [
    "<img src=x onerror=\"document.title='run'\">",
    "</script><script>document.title='run'</script>",
    "--><svg onload=document.title='run'>",
    'a"b\'c`d\\e\\"f\\n',
    'x"} 1\noctavo:fake_metric{a="b"} 2\n# TYPE octavo:fake gauge\n',
    "line\nbreak\r\nand\ttab",
    "{{constructor.constructor('1')()}} ${1} %s {0} __proto__",
    "\u202eright to left\u202c \u2028 \ufeff é 漢 🦙",
    "../../etc/passwd?a=b&c=d#e",
    "javascript:document.title='run'",
]
