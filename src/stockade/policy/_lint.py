"""Hosts on which anybody can publish or receive: a rule for one must not be able to write to it.

Names by which data leaves although the host itself is honest: forges, hubs, paste and file drops, chat hooks,
request bins (egress.md cases 68 and 98), and public DNS resolvers over HTTPS, which answer for every name of the
world and carry any data to it (case 44). The lists hold what is common, not all there is: they catch a mistake, the
gate enforces the rule that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade.policy._errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stockade.policy._hosts import HostPattern
    from stockade.policy._rules import HostRule

# A name that starts with a dot stands for all names below it; others stand for themselves.
_FORGES = (
    *("github.com", "api.github.com", "uploads.github.com", "gist.github.com", ".githubusercontent.com"),
    *("gitlab.com", "bitbucket.org", "api.bitbucket.org", "codeberg.org", "sourceforge.net", "gitee.com", "git.sr.ht"),
    *("huggingface.co", "hf.co", "kaggle.com", "www.kaggle.com", "upload.pypi.org", "test.pypi.org", "replit.com"),
)
_PASTE = (
    *("pastebin.com", "paste.ee", "dpaste.com", "dpaste.org", "hastebin.com", "ix.io", "termbin.com", "sprunge.us"),
    *("paste.rs", "pastes.dev", "bpa.st", "paste.debian.net", "paste.mozilla.org", "rentry.co", "controlc.com"),
    *("privatebin.net", "justpaste.it", "telegra.ph", "write.as", "p.ip.fi", "cl1p.net", "ghostbin.com"),
)
_DROPS = (
    *("0x0.st", "transfer.sh", "file.io", "catbox.moe", ".catbox.moe", "gofile.io", ".gofile.io", "tmpfiles.org"),
    *("bashupload.com", "oshi.at", "uguu.se", "temp.sh", "wetransfer.com", ".wetransfer.com", "pixeldrain.com"),
    *("mega.nz", "mediafire.com", "www.mediafire.com", "imgur.com", "api.imgur.com", "docs.google.com"),
    *("drive.google.com", "dropbox.com", "www.dropbox.com", "api.dropboxapi.com", "content.dropboxapi.com"),
    *("script.google.com", "forms.gle", "archive.org", "web.archive.org", ".dropboxusercontent.com"),
)
_HOOKS = (
    *("webhook.site", ".webhook.site", "requestbin.com", ".requestbin.com", ".pipedream.net", "beeceptor.com"),
    *("discord.com", "discordapp.com", ".discordapp.com", "hooks.slack.com", "slack.com", "files.slack.com"),
    *("api.telegram.org", "ntfy.sh", "pushover.net", "api.pushover.net", "maker.ifttt.com", "hooks.zapier.com"),
    *(".ngrok.io", ".ngrok.app", ".ngrok-free.app", ".trycloudflare.com", ".loca.lt", ".serveo.net", ".oast.fun"),
    *(".oastify.com", ".burpcollaborator.net", ".interact.sh", ".requestcatcher.com", ".localhost.run"),
)
_RESOLVERS = (
    *("dns.google", "dns.google.com", "dns64.dns.google", "8888.google", "8.8.8.8", "8.8.4.4"),
    *("2001:4860:4860::8888", "2001:4860:4860::8844", "cloudflare-dns.com", ".cloudflare-dns.com", "one.one.one.one"),
    *("1.1.1.1", "1.0.0.1", "1.1.1.2", "1.0.0.2", "1.1.1.3", "1.0.0.3", "2606:4700:4700::1111"),
    *("2606:4700:4700::1001", ".cloudflare-gateway.com", "dns.quad9.net", "9.9.9.9", "149.112.112.112"),
    *("dns9.quad9.net", "dns10.quad9.net", "dns11.quad9.net", "dns12.quad9.net", "2620:fe::fe", "2620:fe::9"),
    *("doh.opendns.com", "doh.umbrella.com", "doh.familyshield.opendns.com", "208.67.222.222", "208.67.220.220"),
    *("dns.adguard.com", "dns.adguard-dns.com", ".adguard-dns.com", "dns.nextdns.io", ".nextdns.io"),
    *("doh.cleanbrowsing.org", "doh.dns.sb", "dns.sb", ".dns.sb", "dns.alidns.com", "223.5.5.5", "223.6.6.6"),
    *("doh.pub", "dns.pub", "doh.360.cn", "dns.mullvad.net", ".dns.mullvad.net", "doh.mullvad.net"),
    *("freedns.controld.com", "dns.controld.com", ".dns.controld.com", "doh.libredns.gr", "doh.applied-privacy.net"),
    *("dns.switch.ch", "dns.digitale-gesellschaft.ch", "doh.ffmuc.net", "doh.xfinity.com", "dns0.eu", ".dns0.eu"),
    *("wikimedia-dns.org", "doh.tiar.app", "jp.tiar.app", "ordns.he.net", "dns.njal.la", "dnsforge.de", "doh.li"),
    *("public.dns.iij.jp", "anycast.uncensoreddns.org", "unicast.uncensoreddns.org", ".rethinkdns.com"),
    *("dns.twnic.tw", "dns.comss.one", "dns.decloudus.com", "kaitain.restena.lu"),
)


def _table(names: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    listed = list(names)
    return frozenset(one for one in listed if one[0] != "."), frozenset(one for one in listed if one[0] == ".")


_ASKED_BY_POST = ("/git-upload-pack", "/paths-info/*")
"""Ends of paths to which a POST only asks: git's smart protocol (gitprotocol-http) and the Hub's list of files."""
_OPEN = _table((*_FORGES, *_PASTE, *_DROPS, *_HOOKS))
_DNS = _table(_RESOLVERS)


def check_content(rule: HostRule) -> None:
    """Refuse a rule that could write to a host of many owners, or that reaches a public resolver.

    Raises:
        PolicyError: unless the rule only reads (see :func:`_only_reads`) or says ``unsafe_many_owners: true``.
    """
    if rule.unsafe_many_owners:
        return
    if _meets(_DNS, rule.host):
        hint = "names are looked up outside the sandbox; a rollout needs no resolver"
        raise BadValue(f"{rule.host} answers DNS queries over HTTPS for any name", hint=hint, loc=("host",))
    if _meets(_OPEN, rule.host) and not _only_reads(rule):
        hint = "add 'read_only: true', or GET and HEAD under 'methods' with 'paths'"
        raise BadValue(f"anybody can publish or receive on {rule.host}", hint=hint, loc=("host",))


def _meets(table: tuple[frozenset[str], frozenset[str]], host: HostPattern) -> bool:
    exact, below = table
    if host.is_suffix:
        stem = host.text[1:]
        return any(one.endswith(stem) for one in (*exact, *below)) or any(stem.endswith(one) for one in below)
    if host.is_address:
        return host.text in exact
    return host.text in exact or any(host.text.endswith(one) for one in below)


def _only_reads(rule: HostRule) -> bool:
    """Tell whether a rule lets nothing be stored at its host, whatever may be said in a query."""
    if rule.read_only:
        return True
    if rule.methods is None or rule.paths is None:
        return False
    if set(rule.methods) <= {"GET", "HEAD"}:
        return True
    asks = all(glob.text.endswith(_ASKED_BY_POST) for glob in rule.paths)
    return asks and set(rule.methods) <= {"GET", "HEAD", "POST"}
