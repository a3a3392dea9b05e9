"""Languages by their ISO 639-1 codes and English names, with three of ISO 639-3 that models of speech know."""

from __future__ import annotations

from typing import NamedTuple

_TABLE = """
aa=Afar, ab=Abkhazian, ae=Avestan, af=Afrikaans, ak=Akan, am=Amharic, an=Aragonese, ar=Arabic, as=Assamese
av=Avaric, ay=Aymara, az=Azerbaijani, ba=Bashkir, be=Belarusian, bg=Bulgarian, bi=Bislama, bm=Bambara
bn=Bengali, bo=Tibetan, br=Breton, bs=Bosnian, ca=Catalan, ce=Chechen, ch=Chamorro, co=Corsican, cr=Cree
cs=Czech, cu=Church Slavic, cv=Chuvash, cy=Welsh, da=Danish, de=German, dv=Divehi, dz=Dzongkha, ee=Ewe
el=Greek, en=English, eo=Esperanto, es=Spanish, et=Estonian, eu=Basque, fa=Persian, ff=Fulah, fi=Finnish
fj=Fijian, fo=Faroese, fr=French, fy=Western Frisian, ga=Irish, gd=Scottish Gaelic, gl=Galician, gn=Guarani
gu=Gujarati, gv=Manx, ha=Hausa, he=Hebrew, hi=Hindi, ho=Hiri Motu, hr=Croatian, ht=Haitian Creole
hu=Hungarian, hy=Armenian, hz=Herero, ia=Interlingua, id=Indonesian, ie=Interlingue, ig=Igbo, ii=Sichuan Yi
ik=Inupiaq, io=Ido, is=Icelandic, it=Italian, iu=Inuktitut, ja=Japanese, jv=Javanese, ka=Georgian, kg=Kongo
ki=Kikuyu, kj=Kuanyama, kk=Kazakh, kl=Kalaallisut, km=Khmer, kn=Kannada, ko=Korean, kr=Kanuri, ks=Kashmiri
ku=Kurdish, kv=Komi, kw=Cornish, ky=Kyrgyz, la=Latin, lb=Luxembourgish, lg=Ganda, li=Limburgish, ln=Lingala
lo=Lao, lt=Lithuanian, lu=Luba-Katanga, lv=Latvian, mg=Malagasy, mh=Marshallese, mi=Maori, mk=Macedonian
ml=Malayalam, mn=Mongolian, mr=Marathi, ms=Malay, mt=Maltese, my=Burmese, na=Nauru, nb=Bokmal
nd=North Ndebele, ne=Nepali, ng=Ndonga, nl=Dutch, nn=Nynorsk, no=Norwegian, nr=South Ndebele, nv=Navajo
ny=Chichewa, oc=Occitan, oj=Ojibwa, om=Oromo, or=Odia, os=Ossetian, pa=Punjabi, pi=Pali, pl=Polish
ps=Pashto, pt=Portuguese, qu=Quechua, rm=Romansh, rn=Rundi, ro=Romanian, ru=Russian, rw=Kinyarwanda
sa=Sanskrit, sc=Sardinian, sd=Sindhi, se=Northern Sami, sg=Sango, si=Sinhala, sk=Slovak, sl=Slovenian
sm=Samoan, sn=Shona, so=Somali, sq=Albanian, sr=Serbian, ss=Swati, st=Southern Sotho, su=Sundanese
sv=Swedish, sw=Swahili, ta=Tamil, te=Telugu, tg=Tajik, th=Thai, ti=Tigrinya, tk=Turkmen, tl=Tagalog
tn=Tswana, to=Tongan, tr=Turkish, ts=Tsonga, tt=Tatar, tw=Twi, ty=Tahitian, ug=Uyghur, uk=Ukrainian, ur=Urdu
uz=Uzbek, ve=Venda, vi=Vietnamese, vo=Volapuk, wa=Walloon, wo=Wolof, xh=Xhosa, yi=Yiddish, yo=Yoruba
za=Zhuang, zh=Chinese, zu=Zulu, fil=Filipino, haw=Hawaiian, yue=Cantonese"""
_OTHER_NAMES = {
    "mandarin": "zh",
    "castilian": "es",
    "flemish": "nl",
    "valencian": "ca",
    "moldavian": "ro",
    "haitian": "ht",
    "myanmar": "my",
    "sinhalese": "si",
    "pushto": "ps",
    "panjabi": "pa",
    "letzeburgesch": "lb",
    "farsi": "fa",
}


class Language(NamedTuple):
    """A language. `name`: its English name, capitalized."""

    code: str
    name: str


LANGUAGES = {
    code: Language(code, name)
    for code, name in (entry.strip().split("=") for entry in _TABLE.replace("\n", ", ").split(", ") if entry.strip())
}
_BY_NAME = {each.name.lower(): each for each in LANGUAGES.values()} | {
    name: LANGUAGES[code] for name, code in _OTHER_NAMES.items()
}
ENGLISH = LANGUAGES["en"]


def find_language(text: str) -> Language | None:
    """Return the language with this code or English name, in upper or lower case; None if it is unknown."""
    wanted = text.strip().lower()
    return LANGUAGES.get(wanted) or _BY_NAME.get(wanted)
