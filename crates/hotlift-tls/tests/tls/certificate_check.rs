//! Tests certificate folders made with the `openssl` command. The check of a folder must find the same problems as a
//! handshake.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use hotlift_tls::{Credentials, Listing, Tls};
use tempfile::TempDir;

use crate::support::{connect_pair, hotlift, line};

/// The host of all certificates.
const NAMES: &str = "subjectAltName=DNS:b";

/// OpenSSL's configuration of a CA and of a host.
const CONFIG: &str = "[req]\ndistinguished_name=dn\nprompt=no\n[dn]\nCN=name\n\
    [ca]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n\
    [both]\nextendedKeyUsage=serverAuth,clientAuth\n[server]\nextendedKeyUsage=serverAuth\n";

/// A working folder for certificates.
struct Maker(TempDir);

impl Maker {
    /// Creates it; returns `None` without OpenSSL.
    fn new() -> Option<Self> {
        if Command::new("openssl").arg("version").output().is_err() {
            hotlift_testkit::skip!("openssl", "no command 'openssl'");
            return None;
        }
        let maker = Self(tempfile::tempdir().unwrap());
        fs::write(maker.path("config"), CONFIG).unwrap();
        Some(maker)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn openssl(&self, words: &str) {
        let mut command = Command::new("openssl");
        command.current_dir(self.0.path()).args(words.split(' '));
        let output = command.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}: {printed}");
    }

    /// Makes NAME.key and NAME.crt, signed by `issuer`; self-signed if that is empty.
    fn certificate(&self, name: &str, issuer: &str, extensions: &str, more: &str) {
        self.openssl(&format!(
            "ecparam -name prime256v1 -genkey -noout -out {name}.key"
        ));
        self.sign(name, issuer, extensions, more);
    }

    /// Makes NAME.crt for an existing key.
    fn sign(&self, name: &str, issuer: &str, extensions: &str, more: &str) {
        let section = format!("[{extensions}]\n");
        let config = CONFIG.replace(&section, &format!("{section}{more}\n"));
        fs::write(self.path("config"), config).unwrap();
        self.openssl(&format!(
            "req -new -key {name}.key -config config -subj /CN={name} -out {name}.csr"
        ));
        let by = match issuer {
            "" => format!("-signkey {name}.key"),
            issuer => format!("-CA {issuer}.crt -CAkey {issuer}.key -CAcreateserial"),
        };
        self.openssl(&format!(
            "x509 -req -in {name}.csr {by} -days 30 -extfile config -extensions {extensions} -out {name}.crt"
        ));
    }

    fn text(&self, names: &[&str]) -> String {
        let files = names.iter().map(|name| fs::read_to_string(self.path(name)));
        files.map(Result::unwrap).collect()
    }

    /// Makes a host's folder: one certificate for both roles, and a list of revoked certificates unless `list` is empty.
    fn folder(&self, ca: &str, certificates: &[&str], key: &str, list: &str) -> PathBuf {
        let dir = self.path(&format!("{:08x}", fastrand::u32(..)));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("ca-cert.pem"), self.text(&[ca])).unwrap();
        for role in ["server", "client"] {
            let text = self.text(certificates);
            fs::write(dir.join(format!("{role}-cert.pem")), text).unwrap();
            fs::write(dir.join(format!("{role}-key.pem")), self.text(&[key])).unwrap();
        }
        if !list.is_empty() {
            fs::write(dir.join("ca-crl.pem"), self.text(&[list])).unwrap();
        }
        dir
    }

    /// Makes NAME.crl, the list of `ca`, with further configuration in `more`.
    fn list(&self, name: &str, ca: &str, more: &str) {
        let config =
            "[ca]\ndefault_ca=c\n[c]\ndatabase=index.txt\ncrlnumber=number\ndefault_md=sha256\n";
        fs::write(self.path("lists"), config).unwrap();
        fs::write(self.path("number"), "01\n").unwrap();
        self.openssl(&format!(
            "ca -gencrl -config lists -keyfile {ca}.key -cert {ca}.crt {more} -out {name}.crl"
        ));
    }
}

/// Returns the folder's problems, and the error of a handshake between two hosts with it, at the client and at the server.
fn check(dir: &Path) -> (Vec<String>, Option<String>) {
    let listing = Listing::read(dir, std::time::SystemTime::now());
    let problems: Vec<_> = listing.problems().collect();
    assert_eq!(listing.is_usable(), problems.is_empty());
    let opened = || Credentials::open(dir).map(|it| Tls::new(it.into(), hotlift()));
    let outcome = match (opened(), opened()) {
        (Ok(client), Ok(server)) => {
            let (client, server) = connect_pair(&client, "b", &server);
            let errors = [client.err(), server.err()];
            let errors: Vec<_> = errors.iter().flatten().map(|error| line(error)).collect();
            (!errors.is_empty()).then(|| errors.join("; "))
        }
        (Err(error), _) | (_, Err(error)) => Some(line(&error)),
    };
    (problems, outcome)
}

#[test]
fn the_check_finds_every_cause_for_which_a_handshake_fails() {
    let Some(maker) = Maker::new() else {
        return;
    };
    maker.certificate("root", "", "ca", "");
    maker.certificate("other", "", "ca", "");
    maker.certificate("middle", "root", "ca", "");
    maker.certificate("direct", "root", "both", NAMES);
    maker.certificate("leaf", "middle", "both", NAMES);
    maker.certificate("unnamed", "root", "both", "");
    maker.certificate("server", "root", "server", NAMES);
    maker.certificate("self", "", "ca", NAMES);
    maker.openssl("genrsa -out small.key 1024");
    maker.sign("small", "root", "both", NAMES);
    maker.openssl("pkcs8 -topk8 -passout pass:x -in direct.key -out pkcs8.key");
    maker.openssl("ec -aes128 -passout pass:x -in direct.key -out sec1.key");
    fs::write(maker.path("index.txt"), "").unwrap();
    maker.list("good", "root", "-crldays 30");
    maker.list(
        "past",
        "root",
        "-crl_lastupdate 20260101000000Z -crl_nextupdate 20260201000000Z",
    );
    maker.list("foreign", "other", "-crldays 30");
    maker.openssl("ca -config lists -keyfile root.key -cert root.crt -revoke direct.crt");
    maker.list("revoked", "root", "-crldays 30");
    let folder = |ca: &str, files: &[&str], list: &str| {
        let key = files.last().unwrap().replace(".crt", ".key");
        maker.folder(ca, files, &key, list)
    };
    for (dir, found, at_handshake) in [
        (folder("root.crt", &["direct.crt"], ""), "", ""),
        (folder("root.crt", &["direct.crt"], "good.crl"), "", ""),
        (folder("root.crt", &["direct.crt"], "foreign.crl"), "", ""),
        (
            maker.folder("root.crt", &["leaf.crt", "middle.crt"], "leaf.key", ""),
            "",
            "",
        ),
        (
            folder("other.crt", &["direct.crt"], ""),
            "is signed by a CA that this side does not trust (CN=root)",
            "",
        ),
        (
            folder("root.crt", &["leaf.crt"], ""),
            "is signed by a CA that this side does not trust (CN=middle), and no intermediate certificate in its chain",
            "",
        ),
        (
            folder("root.crt", &["direct.crt"], "revoked.crl"),
            "is revoked",
            "",
        ),
        (
            folder("root.crt", &["direct.crt"], "past.crl"),
            "the list of revoked certificates here expired on 2026-02-01T00:00:00Z",
            "",
        ),
        (
            folder("root.crt", &["unnamed.crt"], ""),
            "is for no host",
            "is not for 'b': its subjectAltName has no name",
        ),
        (
            folder("root.crt", &["server.crt"], ""),
            "is not valid for a TLS client",
            "",
        ),
        (
            folder("self.crt", &["self.crt"], ""),
            "is that of a CA, not of a host",
            "",
        ),
        (
            folder("root.crt", &["small.crt"], ""),
            "use RSA of 2048 to 8192 bits",
            "",
        ),
        (
            folder("root.crt", &["middle.crt", "leaf.crt"], ""),
            "is that of a CA (CN=middle); put the certificate of the host first",
            "",
        ),
        (
            maker.folder("root.crt", &["direct.crt"], "leaf.key", ""),
            "do not match; the key belongs to another certificate",
            "",
        ),
        (
            maker.folder("root.crt", &["direct.crt"], "pkcs8.key", ""),
            "is encrypted, and Hotlift has no passphrase for it; decrypt it by 'openssl pkey -in",
            "",
        ),
        (
            maker.folder("root.crt", &["direct.crt"], "sec1.key", ""),
            "is encrypted, and Hotlift has no passphrase for it; decrypt it by 'openssl pkey -in",
            "",
        ),
    ] {
        let (problems, outcome) = check(&dir);
        if found.is_empty() {
            assert_eq!((problems, outcome), (Vec::new(), None));
            continue;
        }
        let words = if at_handshake.is_empty() {
            found
        } else {
            at_handshake
        };
        let outcome = outcome.unwrap_or_else(|| panic!("no handshake refuses it: {problems:?}"));
        assert!(outcome.contains(words), "{words}: {outcome}");
        assert!(
            problems.iter().any(|problem| problem.contains(found)),
            "{found}: {problems:?}"
        );
        for text in problems.iter().chain([&outcome]) {
            let of_library = ["OtherError", "KeyMismatch", "UNIX", "failed to parse"];
            let is_bare =
                |word: &&str| text.starts_with(*word) || text.contains(&format!("it {word}"));
            assert!(!of_library.iter().any(is_bare), "{text}");
        }
    }
}

#[test]
fn only_a_revocation_list_of_another_ca_is_warned_of() {
    let Some(maker) = Maker::new() else {
        return;
    };
    maker.certificate("root", "", "ca", "");
    maker.certificate("other", "", "ca", "");
    maker.certificate("middle", "root", "ca", "");
    maker.certificate("leaf", "middle", "both", NAMES);
    fs::write(maker.path("index.txt"), "").unwrap();
    for (ca, is_warned_of) in [("root", false), ("middle", false), ("other", true)] {
        maker.list(ca, ca, "-crldays 30");
        let list = format!("{ca}.crl");
        let dir = maker.folder("root.crt", &["leaf.crt", "middle.crt"], "leaf.key", &list);
        let listing = Listing::read(&dir, std::time::SystemTime::now());
        let warnings = listing.warnings.iter().map(ToString::to_string);
        let words = "of another CA (CN=other)";
        let warned = warnings.filter(|line| line.contains(words)).count();
        assert_eq!(warned, usize::from(is_warned_of), "{ca}: {listing:?}");
    }
}
