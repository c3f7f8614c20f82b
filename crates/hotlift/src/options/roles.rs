//! Which options mean something to whom, what their defaults are there, and how help groups them: the
//! columns of the table that commands are made of.

use super::{OptionInfo, Options};

/// Who migrates, as far as options go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Both ends of a built-in guest's migration, without a monitor: `demo` and `hotlift-bench`.
    Pair,
    /// One built-in guest, with a monitor if that is asked for: `guest run`.
    Guest,
    /// A relay that whoever listens to it steers: `relay`.
    Relay,
    /// A relay beside a QEMU that is told to migrate: `migrate`.
    Migrate,
    /// The same, into a file: `save`.
    Save,
    /// A relay before a QEMU that waits for a guest: `serve`.
    Receive,
    /// The same, out of a file: `restore`.
    Restore,
}

impl Role {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::Pair,
        Self::Guest,
        Self::Relay,
        Self::Migrate,
        Self::Save,
        Self::Receive,
        Self::Restore,
    ];

    /// Whether the other side decides all but what bounds it.
    #[must_use]
    pub fn only_receives(self) -> bool {
        matches!(self, Self::Receive | Self::Restore)
    }
}

/// Where help shows an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Among the first, in this order: what is asked for every day.
    Everyday(u8),
    /// Levels by method.
    Levels,
    /// What channels carry, and how.
    Channels,
    /// Ways of the main channel.
    Main,
    /// Devices that look for zero pages.
    Devices,
    /// What auto-converge does.
    Throttle,
    /// The hand-over of the guest.
    Switchover,
    /// Encryption.
    Tls,
    /// Who may be at the other end.
    TlsNames,
    /// Announcements of the guest at its destination.
    Announce,
    /// What bounds a peer. Besides TLS the only options of who [only receives](Role::only_receives).
    Limits,
    /// What changes nothing of a migration itself.
    Others,
}

impl Group {
    /// Whether short help has it.
    #[must_use]
    pub fn is_in_short_help(self) -> bool {
        matches!(self, Self::Everyday(_) | Self::Tls)
    }

    /// Whether its options say how a connection is encrypted.
    #[must_use]
    pub fn is_of_tls(self) -> bool {
        matches!(self, Self::Tls | Self::TlsNames)
    }

    /// As a heading.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Everyday(_) => "Migration",
            Self::Levels => "Levels of the methods",
            Self::Channels => "Channels and packets",
            Self::Main => "Pages on the main channel",
            Self::Devices => "Zero pages by devices",
            Self::Throttle => "Slowing the guest down",
            Self::Switchover => "Switchover",
            Self::Tls | Self::TlsNames => "TLS",
            Self::Announce => "Announcing the guest",
            Self::Limits => "Limits",
            Self::Others => "Others",
        }
    }

    /// Order of the groups, and of what is asked for every day.
    #[must_use]
    pub fn rank(self) -> (u8, u8) {
        match self {
            Self::Everyday(rank) => (0, rank),
            Self::Levels => (1, 0),
            Self::Channels => (2, 0),
            Self::Main => (3, 0),
            Self::Devices => (4, 0),
            Self::Throttle => (5, 0),
            Self::Switchover => (6, 0),
            Self::Tls => (7, 0),
            Self::TlsNames => (7, 1),
            Self::Announce => (8, 0),
            Self::Limits => (9, 0),
            Self::Others => (10, 0),
        }
    }
}

/// Who does not take an option, or one of its values, and what to do instead.
#[derive(Debug, Clone, Copy)]
pub struct NotFor {
    /// They.
    pub roles: &'static [Role],
    /// The value; `None`: any.
    pub value: Option<&'static str>,
    /// Why not, and who does.
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

/// A default that is not the table's for all.
#[derive(Debug, Clone, Copy)]
pub struct RoleDefault {
    /// Whose it is; of several rows the first that has the role counts.
    pub roles: &'static [Role],
    /// What is set where the option is not given; `None`: nothing, and the words say what comes of it.
    pub value: Option<&'static str>,
    /// As help says it.
    pub words: &'static str,
}

/// Another option without which an option is without effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum With {
    /// `multifd=on`.
    Multifd,
    /// `compress=on`.
    Compress,
    /// `xbzrle=on`.
    Xbzrle,
    /// `auto-converge=on`.
    AutoConverge,
    /// `postcopy-ram=on`.
    PostcopyRam,
    /// `zero-page-detection=dsa-accel`.
    DsaAccel,
}

impl With {
    fn is_on(self, options: &Options) -> bool {
        match self {
            Self::Multifd => options.multifd(),
            Self::Compress => options.compress,
            Self::Xbzrle => options.xbzrle,
            Self::AutoConverge => options.auto_converge,
            Self::PostcopyRam => options.postcopy_ram,
            Self::DsaAccel => options.zero_page_devices,
        }
    }

    fn words(self, options: &Options) -> &'static str {
        match self {
            Self::Multifd if options.compress => "multifd=on, with which compress=on does not go",
            Self::Multifd if options.xbzrle => "multifd=on, with which xbzrle=on does not go",
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
    "the side that sends decides it: give it to 'hotlift migrate' or 'hotlift save'";

impl OptionInfo {
    /// Why the option is not for `role`, and what to do instead; `None` if it is.
    #[must_use]
    pub fn refusal(&self, role: Role) -> Option<&'static str> {
        let is_own = self.group == Group::Limits || self.group.is_of_tls();
        match role.only_receives() && !is_own {
            true => Some(SENDER_DECIDES),
            false => self.row_of(role, None),
        }
    }

    /// The same for one of its values, as it is typed.
    #[must_use]
    pub fn value_refusal(&self, role: Role, value: &str) -> Option<&'static str> {
        self.row_of(role, Some(value))
    }

    fn row_of(&self, role: Role, value: Option<&str>) -> Option<&'static str> {
        let mut rows = self.not_for.iter();
        let row = rows.find(|row| row.value == value && row.roles.contains(&role));
        row.map(|row| row.instead)
    }

    /// The values that it takes of `role`, in words.
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

    /// Its own default for `role`, if that has one.
    #[must_use]
    pub fn role_default(&self, role: Role) -> Option<&'static RoleDefault> {
        self.defaults.iter().find(|row| row.roles.contains(&role))
    }

    /// What the option is without effect for, in `options`; `None` if it has one.
    #[must_use]
    pub fn lacks(&self, options: &Options) -> Option<&'static str> {
        let with = self.with.filter(|with| !with.is_on(options))?;
        Some(with.words(options))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{OPTIONS, option};

    #[test]
    fn ten_options_at_most_are_asked_for_every_day_each_at_a_place_of_its_own() {
        let mut ranks: Vec<_> = OPTIONS
            .iter()
            .filter_map(|option| match option.group {
                Group::Everyday(rank) => Some(rank),
                _ => None,
            })
            .collect();
        ranks.sort_unstable();
        let places: Vec<u8> = (1..=10).filter(|place| *place != 2).collect();
        // The second is the level of whatever method is chosen.
        assert_eq!(ranks, places);
    }

    #[test]
    fn a_default_of_a_role_is_a_value_that_the_option_takes() {
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
    fn an_option_without_its_other_half_is_known_and_with_it_is_not() {
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
}
