"""Grids of vectors to which blocks of ggml's types IQ1, IQ2 and IQ3 refer.

A vector's numbers are digits in base 3 or 8, the first the lowest, and the vectors are sorted. A
text has the differences of successive vectors, one byte each (255: more follows), compressed.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

_IQ2_XXS = (
    "c-kdTL2AQ53@l<18zD>(%d(hdF=h$I1Y=ANrudLU2*rmIaws|GB|Y{5eM{fc?<Cq*hmn{WG13eC6@n><MkizoXsW"
    "~vl50RJDl2m7l>-VONs5<?--j^MS$$Sm_mIWXNRx`}`lhW;fD&tS8uoyGYhkh@T$HQ2=<b2X&%=K(TB9K%(VAd`r"
    "G%Wfo|dbUX6g;ijfNs*4E1onKv;J@VY4jnC?R!o%H{)xuU|kHBlGdCd?C4My_4Pbw(9+Z?_MWIx1arY>(hFFY{n;"
    "%BpCw"
)

_IQ2_XS = (
    "c-mc%!D_=W42Fj=LI`7w5GD*0f+-=45K1XIj2?Q}X^fr6PCM<mXW1i9PS-4}!M3oZU!VUw*eti+xSS67FL`-Fv@M"
    "sA0bL-yX#&UF3Z@Jg9OUL##-WLLAqyp=3XYC%BydTt65=6PEV8>kIq+z*GW)c*p6E5X>FME0T6?4(7&|SEwM3XRc"
    "RrqMIwuW}zVW?-|Lj+~&14tJQUT`G52J~I9!I8xQ!ODXtTyR&V^FTvz_C448WI-5Jq}$WAE{)9uciu-SNIHV3@_r"
    "wx8vblsB8^L3!5<Z_VtJhWss=tq<zMi7!rLHB(5VvY&1Wsx_iWP599mLpSoRTrfI@r^qOTie5;y&d&C(g=;IGd78"
    "#)"
)

_IQ2_S = (
    "c-nna!D_=W3>`)YVT=(bgiyjLVT4jf4<+QV<Gx|vutWd<1180>W2fl?O=U}cdhbbnGsOc>-w3cJF{L0LaJ@l_1s("
    "v1b{Ofw;)l5ecGzfFpcrGw9ZMQOKH>qzLJHPMXa~17hguKRt!t6Xo0X49k`I@iUy!UXFl5T7q>WOt%T?T34E|E85"
    "(q+qs7Rf}2t!WkbcRdE_su-?a^f*^J_%|3YF+P4b09QM0im3v$)1$>dX2D=f9ct?6)GTXL|aTQu6b8xy_eT~ym;$"
    "O{&AX3f0W*$UJaV_nXH;M^R>zA5k*#<*bA>SK>-qoJ%5YAm&TobK53l?U|K?4mZ#z^>~y*k+!9GT;z*5_&T)VvnX"
    "a8$;{ruIEM+exG)j1forhPTGY=|vG6Ot<{t<PZM(o=GWs}}P7YW1Qk$)$?-<sZ710T&F)7KfH"
)

_IQ3_XXS = (
    "c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr"
    "{vBYHv*cdV0O)CtUZJ2GE2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzL"
    "mQUhji9F8H_GYz%P^Zs!k$647z^#<AY<`zPTxiRU1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE"
)

_IQ3_S = (
    "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AY"
    "w`3Z~5QRnqP#h<ZksOlWI2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8Hzd"
    "Av2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZ"
    "bZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8*UZuoxikHuF!0#39cWm~!EcX8LtX"
    "Xs_(tlcSv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W"
)

_IQ1_S = (
    "c-n1M*Mi$H3@e8yd1Umx|Nor@NGW!%)#YqagA<^CDTg(6ZJ|1H!iNh)l@?Bc)Bd&JA{v(QGvn*PW<<El3ojKJSWt"
    "+9xz^Z>Pl!)HmFi7gaoCSbtKUtiH;EyJ$%*4}w{CD6BgI|vq^7fCINL0yQ7i?#;D9g&48Ivj%cvY)({reVqvp-hT"
    "RgCfRV(+g!-Y>In6=a>b5UwCqs{o!p4T?CiYYhYw+=sjL^)UcNW%W4Xgy7*9`|9TW9wb}42KzW+ba`HK&9dm5pNf"
    "d@{)0)QlAq0T|$XsRH&HXqS?vfRTi<jGyWX71VgwhEW+4tHQKWR%%s6ICy^I$L)KOrZucsmUW(st07<4I6Q<K~Ky"
    "Q{0YUIcwL6iH|_Bd^eRfTzo$HHV~)aRRd%+zD&lUZs;&aSJLl_Z?$OxgkzdYjOX3<%o!m&dZMg@!~YtHog6tUb1$"
    "dlZI}B3^bw3BJVq#LM(bKVm7(o3Y|>>L-`x#@3QJn?%L7NG0_@pXmsf5&Lph?vP#9<TG@cw<Xv*sT02Iw3*yT5hQ"
    "2kyhL_n<h_-5rKcpn>J;&B=!TIiF|4~d6ITYaR=u1$6TIP*lJ-bKA#HFJgn)%eI+Mh}+93|4+XKjZk?86dlT#nM%"
    "<@ycdXqjEf;4S*%q=e?z6O9#>QsWj-NkoPdm*%>0w{xy7L$)AGI8!k9c)%Ej|mj9-mRKg5lntGy~3iGN#ruv1Fr*"
    "UqnGeN%j_hvquWNpsNzlrT%AnEvzjnmV_mF8Psmk=B)TIzeEC4LBUWqGegEO$<3@6nFp|(imhX#kd^agTkL1jZEy"
    "nZ;)zza?I(*F9;D-&~iiw~CjOhPxq`ody4+At?f{92D#NsRnfwZ%!dcs&X`aCXlEQhOoSTP(uaN9<GUQUAe@l~bk"
    "gO>D^mljRYD-D&w$JBo|#ovfNY<(=^&&<MX1hLq!Z-!w*lOzUgyCm`^XpS%I11&uUn}{CmaUJ=1`xnWK8KD"
)

_GRIDS = {
    "iq1_s": (_IQ1_S, 3, 8),
    "iq2_xxs": (_IQ2_XXS, 3, 8),
    "iq2_xs": (_IQ2_XS, 3, 8),
    "iq2_s": (_IQ2_S, 3, 8),
    "iq3_xxs": (_IQ3_XXS, 8, 4),
    "iq3_s": (_IQ3_S, 8, 4),
}
"""Differences, base, and numbers of a vector."""


@cache
def grid(name: str) -> NDArray[np.uint8]:
    """Return the vectors of a type as digits: [vectors, 8 or 4]; iq1_m has those of iq1_s."""
    text, base, size = _GRIDS[name]
    steps = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
    vectors = np.cumsum(steps, dtype=np.int64)[steps != 255]
    digits: NDArray[np.uint8] = (vectors[:, None] // base ** np.arange(size) % base).astype(
        np.uint8
    )
    return digits
