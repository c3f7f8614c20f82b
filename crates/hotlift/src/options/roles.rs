//! Roles of commands: for each role, the permitted options, their defaults, and the sections of help. The flags of the commands
//! are generated from these columns of the table.

use super::{OptionInfo, Options, StreamOptions};

/// Role of a command in a migration, as far as its options depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Both ends of a migration of a built-in guest, without a monitor: `demo` and `hotlift-bench`.
    Pair,
    /// One built-in guest, optionally with a monitor: `guest run`.
    Guest,
    /// A relay between any two ends: `relay`.
    Relay,
    /// A relay at the source that starts its QEMU's migration: `migrate`.
    Migrate,
    /// A relay at the source that saves its QEMU's VM to a file: `save`.
    Save,
    /// A relay at the destination in front of a QEMU that waits for a guest: `serve`.
    Receive,
    /// A program that restores a VM from a file into a QEMU: `restore`.
    Restore,
}

impl Role {
    /// All roles.
    pub const ALL: &'static [Self] = &[
        Self::Pair,
        Self::Guest,
        Self::Relay,
        Self::Migrate,
        Self::Save,
        Self::Receive,
        Self::Restore,
    ];

    /// Returns true if the sending side decides all options except limits and TLS.
    #[must_use]
    pub fn only_receives(self) -> bool {
        matches!(self, Self::Receive | Self::Restore)
    }
}

/// Section of help that shows an option. Sections are in the order of the variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// First section: options for everyday use. The number is an option's position in the section.
    Everyday(u8),
    /// Compression levels by method.
    Levels,
    /// Multifd channels and their packets.
    Channels,
    /// Formats of pages on the main channel.
    Main,
    /// DSA devices that detect zero pages.
    Devices,
    /// Throttling of the vCPUs by auto-converge.
    Throttle,
    /// The switchover of the guest.
    Switchover,
    /// TLS encryption.
    Tls,
    /// Names of permitted peers.
    TlsNames,
    /// Network announcements of the guest at its destination.
    Announce,
    /// Limits for a peer. A role that [only receives](Role::only_receives) accepts only options of this group and the TLS
    /// options.
    Limits,
    /// Options that do not change the migration itself.
    Others,
}

impl Group {
    /// Returns true if the short help (`-h`) shows the section.
    #[must_use]
    pub fn is_in_short_help(self) -> bool {
        matches!(self, Self::Everyday(_) | Self::Tls)
    }

    /// Returns true if the group's options control the encryption of a connection.
    #[must_use]
    pub fn is_of_tls(self) -> bool {
        matches!(self, Self::Tls | Self::TlsNames)
    }

    /// Returns the heading of the section in help.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Everyday(_) => "Migration",
            Self::Levels => "Levels of the methods",
            Self::Channels => "Channels and packets",
            Self::Main => "Pages on the main channel",
            Self::Devices => "Zero pages by devices",
            Self::Throttle => "Auto-converge",
            Self::Switchover => "Switchover",
            Self::Tls | Self::TlsNames => "TLS",
            Self::Announce => "Announcements of the guest",
            Self::Limits => "Limits",
            Self::Others => "Others",
        }
    }
}

/// Roles that reject an option or one of its values, with an alternative for the operator.
#[derive(Debug, Clone, Copy)]
pub struct NotFor {
    /// The roles that reject the option.
    pub roles: &'static [Role],
    /// The rejected value; `None` if the roles reject the whole option.
    pub value: Option<&'static str>,
    /// Reason for the rejection, and the alternative.
    pub instead: &'static str,
}

impl NotFor {
    pub(super) const fn any(roles: &'static [Role], instead: &'static str) -> Self {
        Self {
            roles,
            value: None,
            instead,
        }
    }
}

/// Default value of some roles, in place of the table's default.
#[derive(Debug, Clone, Copy)]
pub struct RoleDefault {
    /// Roles that have this default. If a role is in several rows, the first row applies.
    pub roles: &'static [Role],
    /// Value that is set if the operator does not set the option. `None` sets nothing; `help_text` describes the effect.
    pub value: Option<&'static str>,
    /// Description of the default in help.
    pub help_text: &'static str,
}

/// Setting without which an option has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum With {
    /// The option needs `multifd=on`.
    Multifd,
    /// The option needs `compress=on`.
    Compress,
    /// The option needs `xbzrle=on`.
    Xbzrle,
    /// The option needs `auto-converge=on`.
    AutoConverge,
    /// The option needs `postcopy-ram=on`.
    PostcopyRam,
    /// The option needs `zero-page-detection=dsa-accel`.
    DsaAccel,
}

impl With {
    fn is_on(self, options: &Options) -> bool {
        match self {
            Self::Multifd => options.stream.multifd(),
            Self::Compress => options.stream.compress,
            Self::Xbzrle => options.stream.xbzrle,
            Self::AutoConverge => options.auto_converge.on,
            Self::PostcopyRam => options.postcopy.ram,
            Self::DsaAccel => options.zero_pages.devices,
        }
    }

    pub(super) fn help_text(self, stream: &StreamOptions) -> &'static str {
        match self {
            Self::Multifd if stream.compress => "multifd=on, which excludes compress=on",
            Self::Multifd if stream.xbzrle => "multifd=on, which excludes xbzrle=on",
            Self::Multifd => "multifd=on",
            Self::Compress => "compress=on",
            Self::Xbzrle => "xbzrle=on",
            Self::AutoConverge => "auto-converge=on",
            Self::PostcopyRam => "postcopy-ram=on",
            Self::DsaAccel => "zero-page-detection=dsa-accel",
        }
    }
}

const SENDER_DECIDES: &str =
    "the sending side decides it: give it to 'hotlift migrate' or 'hotlift save'";

impl OptionInfo {
    /// Returns the reason why `role` rejects the option, with the alternative. Returns `None` if `role` accepts the option.
    #[must_use]
    pub fn refusal(&self, role: Role) -> Option<&'static str> {
        let is_own = self.group == Group::Limits || self.group.is_of_tls();
        match role.only_receives() && !is_own {
            true => Some(SENDER_DECIDES),
            false => self.row_of(role, None),
        }
    }

    /// Returns the reason why `role` rejects `value`, as typed, with the alternative. Returns `None` if `role` accepts the
    /// value.
    #[must_use]
    pub fn value_refusal(&self, role: Role, value: &str) -> Option<&'static str> {
        self.row_of(role, Some(value))
    }

    fn row_of(&self, role: Role, value: Option<&str>) -> Option<&'static str> {
        let mut rows = self.not_for.iter();
        let row = rows.find(|row| row.value == value && row.roles.contains(&role));
        row.map(|row| row.instead)
    }

    /// Returns a description of the values that `role` may set.
    #[must_use]
    pub fn values_for(&self, role: Role) -> String {
        let all = self.values.names();
        let is_taken = |name: &&str| self.value_refusal(role, name).is_none();
        let taken: Vec<_> = all.iter().copied().filter(is_taken).collect();
        match taken.len() < all.len() {
            true => format!("one of {}", taken.join(", ")),
            false => self.values.to_string(),
        }
    }

    /// Returns the default of `role`; `None` if `role` uses the table's default.
    #[must_use]
    pub fn role_default(&self, role: Role) -> Option<&'static RoleDefault> {
        self.defaults.iter().find(|row| row.roles.contains(&role))
    }

    /// Returns the missing setting without which the option has no effect. Returns `None` if `options` have that setting, or if
    /// the option needs none.
    #[must_use]
    pub fn lacks(&self, options: &Options) -> Option<&'static str> {
        let with = self.with.filter(|with| !with.is_on(options))?;
        Some(with.help_text(&options.stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{OPTIONS, option};

    #[test]
    fn at_most_ten_options_are_common_each_with_its_own_position() {
        let mut ranks: Vec<_> = OPTIONS
            .iter()
            .filter_map(|option| match option.group {
                Group::Everyday(rank) => Some(rank),
                _ => None,
            })
            .collect();
        ranks.sort_unstable();
        let places: Vec<u8> = (1..=10).filter(|place| *place != 2).collect();
        // Place 2 is that of the chosen method's level.
        assert_eq!(ranks, places);
    }

    #[test]
    fn every_default_of_a_role_is_valid() {
        for info in OPTIONS {
            for row in info.defaults {
                if let Some(value) = row.value {
                    let mut options = Options::default();
                    options.set(info.name, value).unwrap();
                }
            }
        }
    }

    #[test]
    fn an_option_without_effect_names_the_option_that_it_needs() {
        for (name, other, value) in [
            ("multifd-channels", "compress", "off"),
            ("compress-threads", "compress", "on"),
            ("xbzrle-cache-size", "xbzrle", "on"),
            ("cpu-throttle-initial", "auto-converge", "on"),
            ("postcopy-blocktime", "postcopy-ram", "on"),
            ("accel-path", "zero-page-detection", "dsa-accel"),
        ] {
            let mut options = Options::default();
            if name == "multifd-channels" {
                options.set("compress", "on").unwrap();
            }
            let info = option(name).unwrap();
            assert!(info.lacks(&options).is_some(), "{name}");
            options.set(other, value).unwrap();
            assert_eq!(info.lacks(&options), None, "{name}");
        }
    }

    #[test]
    fn a_relay_has_no_options_of_its_qemu() {
        for (name, expected) in [
            ("xbzrle", "a relay keeps no earlier pages"),
            ("xbzrle-cache-size", "a relay has no xbzrle"),
            ("auto-converge", "source's QEMU"),
            ("throttle-trigger-threshold", "source's QEMU"),
            ("cpu-throttle-initial", "source's QEMU"),
            ("cpu-throttle-increment", "source's QEMU"),
            ("cpu-throttle-tailslow", "source's QEMU"),
            ("max-cpu-throttle", "source's QEMU"),
            ("pause-before-switchover", "source's QEMU"),
            ("postcopy-ram", "QEMUs must agree on it"),
            ("avail-switchover-bandwidth", "source's QEMU"),
            ("announce-rounds", "destination's QEMU"),
            ("announce-initial", "destination's QEMU"),
            ("announce-step", "destination's QEMU"),
            ("announce-max", "destination's QEMU"),
            ("multifd-packet-size", "QEMU's packets"),
            ("multifd-normal-page-ratio", "does not change the kind"),
            ("compress-wait-thread", "always waits"),
            ("decompress-threads", "as it reads"),
            ("mem-prealloc", "destination's QEMU"),
        ] {
            let refusal = option(name).unwrap().refusal(Role::Relay).unwrap();
            assert!(refusal.contains(expected), "{name}: {refusal}");
        }
        let detection = option("zero-page-detection").unwrap();
        let refusal = detection.value_refusal(Role::Relay, "dsa-accel").unwrap();
        assert!(refusal.contains("detects zero pages itself"), "{refusal}");
        assert_eq!(
            option("multifd-channels").unwrap().refusal(Role::Relay),
            None
        );
    }
}
