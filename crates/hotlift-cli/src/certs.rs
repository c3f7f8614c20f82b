//! `hotlift certs`: creates a certificate authority (CA) and certificates of hosts for TLS, and shows existing ones.

pub mod error;

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use hotlift_mem::FileError;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::output::{self, warn};
use hotlift_tls::{
    Authority, CA_DAYS, FOLDERS, File, HOST_DAYS, Issued, Listing, Role, find_folder,
};
use serde_json::{Value, json};

use self::error::CertsError;
use crate::error::CommandError;

/// File names are those of QEMU and libvirt, except that of the CA's key.
const CA: &str = "ca-cert.pem";
const CA_KEY: &str = "ca-key.pem";
const REVOKED: &str = "ca-crl.pem";

/// File names of certificate and key, for each role.
const OWN: [(Role, &str, &str); 2] = [
    (Role::Server, "server-cert.pem", "server-key.pem"),
    (Role::Client, "client-cert.pem", "client-key.pem"),
];

/// Width of the text output, in columns.
const WIDTH: usize = 80;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// `hotlift certs`.
#[derive(Debug, Subcommand)]
pub enum CertsCommand {
    /// Create a CA, which signs the certificates of your hosts
    ///
    /// Keep the key of the CA on this host. A person with the key can create certificates that all hosts accept.
    Init(InitArgs),
    /// Create the two certificates of a host: one to accept connections, one to make connections
    ///
    /// With --out, write them and the CA's certificate to a folder for another host:
    ///
    ///   hotlift certs host b.example 192.0.2.2 --out b
    ///
    /// The command prints how to copy that folder.
    #[command(verbatim_doc_comment)]
    Host(HostArgs),
    /// Show certificates: names, end of validity, and problems
    ///
    /// Reads folders in the layout of QEMU and libvirt, and mounted TLS secrets of Kubernetes. The exit code is 1 if there is a
    /// problem.
    Show(ShowArgs),
    /// Renew a host's certificates, for the same names, with new keys
    ///
    /// The command replaces each file atomically. For a crontab on the host of the CA:
    ///
    ///   hotlift certs renew --within 30
    #[command(verbatim_doc_comment)]
    Renew(RenewArgs),
}

/// Flags of `certs init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Folder of the CA
    #[arg(long, value_name = "DIR", default_value = FOLDERS[0])]
    dir: PathBuf,
    /// Name of the CA [default: "Hotlift CA" and a number]
    #[arg(long)]
    name: Option<String>,
    /// Validity in days
    #[arg(long, value_name = "N", default_value_t = CA_DAYS, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Replace an existing CA; certificates that it signed become unusable
    #[arg(long)]
    force: bool,
}

/// Flags of `certs host`.
#[derive(Debug, Args)]
pub struct HostArgs {
    /// DNS names and IP addresses of the host, all that migrations to this host use
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// Folder of the CA
    #[arg(long, value_name = "DIR", default_value = FOLDERS[0])]
    dir: PathBuf,
    /// Folder for the certificates [default: the CA's folder, for the certificates of this host]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Validity in days
    #[arg(long, value_name = "N", default_value_t = HOST_DAYS, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Replace existing certificates
    #[arg(long)]
    force: bool,
}

/// Flags of `certs show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Folder to read [default: /etc/pki/hotlift, or /etc/pki/qemu if the first has no certificates]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Flags of `certs renew`.
#[derive(Debug, Args)]
pub struct RenewArgs {
    /// Folder of the certificates
    #[arg(long, value_name = "DIR", default_value = FOLDERS[0])]
    dir: PathBuf,
    /// Folder of the CA [default: the folder of the certificates]
    #[arg(long, value_name = "DIR")]
    ca: Option<PathBuf>,
    /// Validity of the new certificates in days
    #[arg(long, value_name = "N", default_value_t = HOST_DAYS, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Renew only certificates that expire within this number of days
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(0..=36_500))]
    within: Option<u32>,
}

/// Runs `hotlift certs`.
pub fn run(command: &CertsCommand) -> Result<(), CommandError> {
    match command {
        CertsCommand::Init(args) => Ok(init(args)?),
        CertsCommand::Host(args) => Ok(host(args)?),
        CertsCommand::Show(args) => show(args),
        CertsCommand::Renew(args) => Ok(renew(args)?),
    }
}

fn init(args: &InitArgs) -> Result<(), CertsError> {
    let files = [CA, CA_KEY].map(|name| args.dir.join(name));
    refuse_existing(&files, args.force)?;
    let name = args.name.clone().unwrap_or_else(|| {
        // The number distinguishes several CAs in messages.
        format!("Hotlift CA {:08x}", fastrand::u32(..))
    });
    let ca = Authority::make(&name, args.days, SystemTime::now())?;
    make_folder(&args.dir)?;
    put(&files, &ca, args.force)?;
    warn!(
        "made a CA ({name}) in {}; never copy its key, {CA_KEY}, to another host",
        args.dir.display()
    );
    Ok(())
}

fn host(args: &HostArgs) -> Result<(), CertsError> {
    let authority = authority(&args.dir)?;
    let out = args.out.as_deref().unwrap_or(&args.dir);
    let now = SystemTime::now();
    let mut issued = Vec::new();
    for (role, certificate, key) in OWN {
        let files = [certificate, key].map(|name| out.join(name));
        refuse_existing(&files, args.force)?;
        issued.push((files, authority.issue(&args.names, role, args.days, now)?));
    }
    make_folder(out)?;
    bring_ca(&args.dir, out, args.force)?;
    for (files, issued) in &issued {
        put(files, issued, args.force)?;
    }
    warn!(
        "made the certificates of {} in {}",
        args.names.join(", "),
        out.display()
    );
    if let (Some(_), Some(name)) = (&args.out, args.names.first()) {
        let (out, there) = (out.display(), FOLDERS[0]);
        warn!("copy them:  tar cC {out} . | ssh root@{name} 'mkdir -p {there} && tar xC {there}'");
    }
    Ok(())
}

/// Copies the public files of the CA from the folder `from` to a host's folder `to`.
fn bring_ca(from: &Path, to: &Path, force: bool) -> Result<(), CertsError> {
    for name in [CA, REVOKED] {
        let (source, target) = (from.join(name), to.join(name));
        if !source.exists() || is_same(&source, &target) {
            continue;
        }
        refuse_existing(std::slice::from_ref(&target), force)?;
        write(&target, &read(&source)?, PUBLIC, force)?;
    }
    Ok(())
}

fn is_same(one: &Path, other: &Path) -> bool {
    matches!((fs::read(one), fs::read(other)), (Ok(one), Ok(other)) if one == other)
}

fn renew(args: &RenewArgs) -> Result<(), CertsError> {
    let now = SystemTime::now();
    let listing = Listing::read(&args.dir, now);
    let limit = args.within.map(|days| now + DAY * days);
    let mut is_there = false;
    let mut authority_of_all = None;
    for (role, certificate, key) in OWN {
        let is_it = |file: &&File| file.role == Some(role) && file.path.ends_with(certificate);
        let Some(old) = listing.files.iter().find(is_it) else {
            continue;
        };
        is_there = true;
        if limit.is_some_and(|limit| old.identity.ends > limit) {
            continue;
        }
        let authority = match &authority_of_all {
            Some(authority) => authority,
            None => authority_of_all.insert(authority(args.ca.as_ref().unwrap_or(&args.dir))?),
        };
        let names: Vec<_> = old.identity.names().collect();
        let new = authority.issue(&names, role, args.days, now)?;
        put(
            &[certificate, key].map(|name| args.dir.join(name)),
            &new,
            true,
        )?;
        warn!("renewed {} for {}", old.path.display(), names.join(", "));
    }
    match is_there {
        true => Ok(()),
        false => Err(CertsError::NothingToRenew {
            dir: args.dir.clone(),
        }),
    }
}

fn show(args: &ShowArgs) -> Result<(), CommandError> {
    let dir = match &args.dir {
        Some(dir) => dir.clone(),
        None => find_folder().map_err(CertsError::from)?,
    };
    let now = SystemTime::now();
    let listing = Listing::read(&dir, now);
    let text = if args.json {
        let text = serde_json::to_string_pretty(&as_json(&listing, now));
        text.map_err(|error| TerminalError::Output(error.into()))?
    } else {
        as_text(&listing, now)
    };
    output::result(&text).map_err(TerminalError::Output)?;
    match listing.is_usable() {
        true => Ok(()),
        false => Err(CertsError::Problem { dir }.into()),
    }
}

fn authority(dir: &Path) -> Result<Authority, CertsError> {
    for file in [CA, CA_KEY] {
        if !dir.join(file).exists() {
            return Err(CertsError::NoCa {
                dir: dir.to_owned(),
                file,
            });
        }
    }
    Ok(Authority::open(
        &read(&dir.join(CA))?,
        &read(&dir.join(CA_KEY))?,
    )?)
}

fn read(path: &Path) -> Result<String, FileError> {
    fs::read_to_string(path).map_err(FileError::reading(path))
}

fn refuse_existing(files: &[PathBuf], force: bool) -> Result<(), CertsError> {
    match files.iter().find(|path| path.exists() && !force) {
        Some(path) => Err(CertsError::Exists { path: path.clone() }),
        None => Ok(()),
    }
}

/// Creates a folder that only this user can access; missing parent folders get the usual mode.
fn make_folder(dir: &Path) -> Result<(), FileError> {
    let failed = FileError::writing(dir);
    if dir.is_dir() {
        return Ok(());
    }
    if let Some(above) = dir.parent() {
        fs::create_dir_all(above).map_err(failed)?;
    }
    DirBuilder::new().mode(0o700).create(dir).map_err(failed)
}

/// File mode of certificates, which all users may read; keys only their owner.
const PUBLIC: u32 = 0o644;
const SECRET: u32 = 0o600;

/// Writes a certificate and its key, the key first. A process that reads in between gets an old certificate with a new key,
/// rejects this pair, and retries. In the other order, a crash would lose the new key.
fn put(files: &[PathBuf; 2], issued: &Issued, force: bool) -> Result<(), FileError> {
    let [certificate, key] = files;
    write(key, &issued.key, SECRET, force)?;
    write(certificate, &issued.certificate, PUBLIC, force)
}

/// Writes a file atomically: no process reads an incomplete file.
fn write(path: &Path, text: &str, mode: u32, force: bool) -> Result<(), FileError> {
    let failed = FileError::writing(path);
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let mut file = tempfile::Builder::new()
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(dir.unwrap_or(Path::new(".")))
        .map_err(failed)?;
    // Sets the mode explicitly, since the umask changes the mode of a new file.
    file.as_file()
        .set_permissions(Permissions::from_mode(mode))
        .map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    let kept = match force {
        true => file.persist(path),
        false => file.persist_noclobber(path),
    };
    kept.map(|_| ()).map_err(|error| failed(error.error))
}

/// Returns the days from `now` to `ends`; negative if `ends` is in the past.
fn days_left(ends: SystemTime, now: SystemTime) -> i64 {
    let days = |time: Duration| i64::try_from(time.as_secs() / DAY.as_secs()).unwrap_or(i64::MAX);
    match ends.duration_since(now) {
        Ok(left) => days(left),
        Err(error) => -days(error.duration()) - 1,
    }
}

fn date(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

fn what(file: &File) -> &'static str {
    match file.role {
        None => "CA",
        Some(role) => role.name(),
    }
}

fn as_json(listing: &Listing, now: SystemTime) -> Value {
    let files = listing.files.iter().map(|file| {
        json!({
            "file": file.path,
            "for": what(file),
            "subject": file.identity.subject,
            "names": file.identity.names().collect::<Vec<_>>(),
            "issuer": file.identity.issuer,
            "begins": date(file.identity.begins),
            "ends": date(file.identity.ends),
            "days-left": days_left(file.identity.ends, now),
            "problems": file.problems,
        })
    });
    json!({
        "folder": listing.dir,
        "usable": listing.is_usable(),
        "certificates": files.collect::<Vec<_>>(),
        "problems": listing.problems,
        "warnings": listing.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn as_text(listing: &Listing, now: SystemTime) -> String {
    let mut text = format!("{}\n", listing.dir.display());
    for file in &listing.files {
        let identity = &file.identity;
        let name = file.path.file_name().unwrap_or_default().to_string_lossy();
        paragraph(
            &mut text,
            "  ",
            &format!("{name} ({}): {identity}", what(file)),
        );
        let days = days_left(identity.ends, now);
        let ends = if days < 0 { "ended" } else { "ends" };
        let mut line = format!("{ends} on {}", date(identity.ends));
        // Writing to a String cannot fail.
        let _ = match days {
            0.. => write!(line, ", in {days} days"),
            _ => Ok(()),
        };
        if file.role.is_some() {
            let _ = write!(line, "; signed by {}", identity.issuer);
        }
        paragraph(&mut text, "    ", &line);
        for problem in &file.problems {
            paragraph(&mut text, "    ", &format!("problem: {problem}"));
        }
    }
    for problem in &listing.problems {
        paragraph(&mut text, "  ", &format!("problem: {problem}"));
    }
    for warning in &listing.warnings {
        paragraph(&mut text, "  ", &format!("note: {warning}"));
    }
    text.push('\n');
    let advice = match listing.is_usable() {
        true => HOW_TO_USE,
        false => HOW_TO_HAVE,
    };
    text.push_str(advice);
    text
}

/// Next steps for an operator whose certificates are valid.
const HOW_TO_USE: &str = "\
Every host needs such a folder, with the same CA and its own certificates.
A host's server certificate must have the name or address that peers connect to.
Another host's:  hotlift certs host NAME --out FOLDER  (where the CA's key is)";

/// Ways to get certificates, for an operator who has none.
const HOW_TO_HAVE: &str = "\
Existing certificates need no change:
  libvirt, QEMU    /etc/pki/qemu, with ca-cert.pem, server-cert.pem, server-key.pem,
                   client-cert.pem and client-key.pem
  cert-manager     the folder where the secret is mounted, with ca.crt, tls.crt and
                   tls.key; usages 'server auth' and 'client auth'
Hotlift's own:     hotlift certs init, then hotlift certs host NAME";

/// Appends `words` to `text`, wrapped at the width of a terminal. Each line begins with `indent`; all lines after the first are
/// indented further.
fn paragraph(text: &mut String, indent: &str, words: &str) {
    let mut line = indent.to_owned();
    let mut is_empty = true;
    for word in words.split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            text.push_str(&line);
            text.push('\n');
            line = format!("{indent}  ");
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    text.push_str(&line);
    text.push('\n');
}
